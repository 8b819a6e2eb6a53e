"""Tensor operations without state: attention, log-probabilities, sampling, advantages."""
