"""The built-in decoder: one packed transformer driven by a config and a table of families.

A new family that combines existing parts is one entry in ``families.py``.
"""
