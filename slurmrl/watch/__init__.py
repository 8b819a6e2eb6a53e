"""Observing a run: metrics, events, and the status derived from everything a run writes.

A new sink of metrics is a file in ``sinks``.
"""
