"""Algorithms: which calls make a step, and the code behind each call.

An algorithm is two modules. ``X_schema.py`` has its settings, roles and calls, and is torch-free.
``X.py`` has the interfaces and tensor functions that carry out the calls. A new algorithm = these
two and one line in ``slurmrl.plan.algorithms``.
"""
