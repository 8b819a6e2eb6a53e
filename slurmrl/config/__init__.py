"""The user's configuration: one YAML file, which slurmrl validates completely before it acts.

``schema/`` defines the sections (one file per group of them). ``load`` reads a file with its
overrides, reports all problems at once, and writes the resolved configuration. ``describe``
generates the reference. A new setting is one field with its docstring; nothing else lists the
fields.
"""
