"""The view of a trial for people: its status, incarnations and diagnosis, derived from its files.

A new sink of metrics is a file in ``sinks``.
"""
