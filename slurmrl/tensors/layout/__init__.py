"""Placement of tensor elements on ranks: boxes, shards, and layouts.

Hugging Face files, checkpoints of any world size and engines are all layouts, so loading, saving,
exporting and reallocating are one operation: intersect the boxes, then copy. Torch-free.
"""
