"""Tensors on ranks: operators, layouts and the moves between them, checkpoints, weight versions."""
