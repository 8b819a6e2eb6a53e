"""The user's configuration: one YAML file, validated as a whole before anything else happens.

``schema/`` defines the sections (one file per group of them). ``load`` reads a file with its
overrides, reports all problems at once, and writes the resolved form. ``describe`` generates the
reference. A new setting is one field with its docstring; nothing else lists the fields.
"""
