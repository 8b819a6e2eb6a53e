"""Replacement of shorthand: ``allocation_mode``, ``trial:`` references, sizes in Megatron's terms,
and settings that other roles inherit from the actor.
"""
