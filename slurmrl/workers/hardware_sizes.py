"""Sizes of the measurements of `slurmrl profile-cluster`, on CPUs and on GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

MIB: Final = 2**20


@dataclass(frozen=True)
class MeasureSizes:
    """Sizes of the measurements."""

    point_s: float
    """Minimum seconds for which a measurement is repeated."""
    sides: Sequence[int]
    """Sides of the square matrices to multiply."""
    copy_bytes: int
    message_bytes: Sequence[int]
    file_bytes: int
    files: int
    tokens: int
    """Tokens of a forward pass."""
    rows: int
    """Number of sequences to generate at the same time."""
    new_tokens: int
    model: Mapping[str, Any]
    """Architecture of the model, as in a config.json."""


ON_CPUS: Final = MeasureSizes(
    point_s=0.3,
    sides=[32, 64, 128, 256, 512, 1024],
    copy_bytes=64 * MIB,
    message_bytes=[4096, 65536, MIB, 8 * MIB],
    file_bytes=256 * MIB,
    files=50,
    tokens=1024,
    rows=16,
    new_tokens=32,
    model={
        "model_type": "qwen2",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    },
)
ON_GPUS: Final = MeasureSizes(
    point_s=0.5,
    sides=[256, 512, 1024, 2048, 4096, 8192],
    copy_bytes=1024 * MIB,
    message_bytes=[4096, 65536, MIB, 16 * MIB, 256 * MIB],
    file_bytes=1024 * MIB,
    files=50,
    tokens=8192,
    rows=64,
    new_tokens=64,
    model={
        "model_type": "qwen2",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
)
