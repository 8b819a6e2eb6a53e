"""Stateless tensor operations: attention, log-probabilities, sampling, advantages."""
