"""Checkpoints on disk, and their export to Hugging Face form.

A checkpoint has safetensors files per rank with their layout, and a manifest. ``manifest``,
``tensors``, ``shards`` and ``export`` are torch-free.
"""
