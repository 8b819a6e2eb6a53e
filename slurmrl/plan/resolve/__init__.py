"""Settings that stand for others, replaced by what they mean: ``allocation_mode``, ``trial:``
references, sizes in Megatron's words, and what critic and reference take from the actor."""
