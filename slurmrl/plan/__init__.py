"""The plan: from a configuration to the calls of each process and GPU.

``settings`` loads a configuration and its algorithm's schema; ``build`` makes the ``model.Plan``
from them. ``resolve/`` replaces shorthand and inherited settings, ``checks/`` reject plans that
cannot run, and ``estimates/`` give memory and FLOPs. ``plan_values`` and ``plan_document`` show the
plan to the user. The tables in ``algorithms`` and ``engine_rules`` list the supported combinations.
"""
