"""Replacement of shorthand in a configuration.

Shorthand is ``allocation_mode``, ``trial:`` references, sizes in Megatron's terms, and settings
that other roles inherit from the actor.
"""
