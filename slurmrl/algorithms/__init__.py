"""Algorithms: which calls make a step, and the code behind each call.

Each algorithm is a folder: ``schema.py`` (its settings, roles and calls; torch-free) beside the
interfaces and pure tensor functions that carry it out. A new algorithm = one folder plus one line
in ``slurmrl.plan.algorithms``.
"""
