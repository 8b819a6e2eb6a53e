"""The built-in decoder: one packed transformer driven by a config and a table of families.

A new family whose parts exist is one entry in ``families.py``.
"""
