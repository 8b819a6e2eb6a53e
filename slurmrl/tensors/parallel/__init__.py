"""Ranks, axes, process groups and devices. ``topology`` and ``gpu`` are torch-free."""
