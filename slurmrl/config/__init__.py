"""The user's configuration: one YAML file, which slurmrl validates completely before it acts.

``schema/`` defines the sections, one file per group of sections. ``load`` reads a file with its
overrides, reports all problems at once, and writes the resolved configuration. ``describe``
generates the reference. To add a setting, add one field with its docstring.
"""
