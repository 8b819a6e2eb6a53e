"""Checkpoints on disk: safetensors files per rank with their layout, a manifest, and the export to
Hugging Face form. ``manifest``, ``tensors``, ``shards`` and ``export`` are torch-free.
"""
