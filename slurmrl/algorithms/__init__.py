"""Algorithms: the calls of a step, and the code of each call.

Settings, roles and calls are in a torch-free schema (`*_schema.py`, `policy/schema.py`). The
interfaces and tensor functions that carry out the calls are in modules next to it. A new algorithm
is one of each, and one line in ``slurmrl.plan.algorithms``.
"""
