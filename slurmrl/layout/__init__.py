"""Placement of tensor elements on ranks: boxes, shards, layouts, and copy plans between layouts.

Hugging Face files, checkpoints of any world size and engines are all layouts, so loading, saving,
exporting and reallocating are one operation: plan the copies, then execute them. Torch-free.
"""
