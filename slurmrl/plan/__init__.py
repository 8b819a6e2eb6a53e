"""Planning: from a configuration to the calls of each process and GPU.

``settings`` loads a configuration and its algorithm's schema, and ``build`` makes the
``model.Plan``. ``inherited_settings`` replaces shorthand and inherited settings, ``checks/`` reject
plans that cannot run, and ``estimates/`` predict memory, FLOPs and seconds. ``plan_values`` and
``plan_document`` show the plan to the user. The tables in ``algorithms`` and ``engine_rules`` list
the supported combinations.
"""
