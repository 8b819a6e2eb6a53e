"""Runs over a dataset without training: ``generate`` and ``evaluate``."""
