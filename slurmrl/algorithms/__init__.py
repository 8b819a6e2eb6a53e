"""Algorithms: the calls of a step, and the code of each call.

Settings, roles and calls are in a torch-free schema (`*_schema.py`, `policy/schema.py`). Modules
next to it have the interfaces and tensor functions that execute the calls. A new algorithm needs
one of each, and one line in ``slurmrl.plan.algorithms``.
"""
