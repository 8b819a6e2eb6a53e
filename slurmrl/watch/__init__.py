"""Views of a trial for people: its status, incarnations and diagnosis, computed from its files.

Each sink of metrics is a file in ``sinks``.
"""
