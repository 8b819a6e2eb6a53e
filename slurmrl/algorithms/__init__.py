"""Algorithms: the calls of a step, and the code of each call.

The settings, roles and calls of an algorithm are in a torch-free schema (`*_schema.py`,
`policy/schema.py`). The interfaces and tensor functions that execute the calls are in other
modules. A new algorithm needs a schema, a module with interfaces and one line in
``slurmrl.plan.algorithms``.
"""
