"""The plan: from a configuration to which process runs what on which GPU.

``settings`` loads a configuration and its algorithm's schema; ``build`` makes the ``model.Plan``
from them. ``resolve/`` replaces shorthand and inherited settings, ``checks/`` refuse what cannot
run, ``estimates/`` give memory and FLOPs, and ``report/`` shows the plan to the user. The tables in
``algorithms`` and ``engines`` list what can be planned.
"""
