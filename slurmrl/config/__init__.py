"""The user's configuration: one YAML file, checked as a whole before anything else happens.

``schema/`` holds what may be written (one file per group of sections), ``load`` reads a file with
its overrides and reports every problem at once, ``dump`` writes the resolved form, ``conditions``
are the small languages inside (``stop_when``, ``every_*``) and ``describe`` makes the reference.
A new setting is one field with its docstring; nothing else lists the fields.
"""
