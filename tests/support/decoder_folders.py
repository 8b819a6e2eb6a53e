"""Conversions between whole built-in decoders and Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.decoder import Decoder, build
from slurmrl.models.hf import CONFIG_FILE, Weights, as_array, read_values
from slurmrl.models.shapes import storage_of
from slurmrl.tensors.checkpoint.export import SHARD_BYTES, write_weights
from slurmrl.tensors.checkpoint.tensors import file_entries
from slurmrl.tensors.layout import Array, Box, TensorSpec


def from_hf(folder: Path, head: Head = "lm", *, dtype: torch.dtype = torch.float32) -> Decoder:
    """Load the decoder of a model folder on the CPU, one tensor at a time."""
    config = ModelConfig.from_hf(read_values(folder))
    with torch.device("meta"):
        decoder = build(config, head).to(dtype)
    decoder.to_empty(device="cpu")
    weights = Weights(folder, config, head)
    with torch.no_grad():
        for name, values in (dict(decoder.named_parameters()) | decoder.constants()).items():
            values.copy_(weights.read(name, Box.whole(tuple(values.shape))))
    return decoder


def to_hf(decoder: Decoder, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a decoder's config and weights into an existing folder.

    The weight files equal the output of transformers' ``save_pretrained`` byte for byte. One tensor
    at a time is copied.
    """
    parameters = dict(decoder.named_parameters()) | decoder.constants()
    specs = [
        (name, TensorSpec(tuple(p.shape), str(p.dtype).removeprefix("torch.")))
        for name, p in parameters.items()
    ]

    def read(name: str, box: Box) -> Array:
        return as_array(parameters[name].detach()[box.slices])

    entries = file_entries(specs, read, storage_of(decoder.config))
    write_weights(folder, entries, shard_bytes=shard_bytes)
    values = decoder.config.to_hf(head=decoder.head, dtype=specs[0][1].dtype)
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
