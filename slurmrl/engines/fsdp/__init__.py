"""Data-parallel training with sharded parameters, gradients and moments (FSDP2)."""
