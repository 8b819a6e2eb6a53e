"""Replacement of shorthand: ``allocation_mode``, ``trial:`` references, sizes in Megatron's terms,
and settings that critic and reference inherit from the actor."""
