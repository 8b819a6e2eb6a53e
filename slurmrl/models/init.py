"""Random initial weights: the same for a (seed, name) on every rank and in every layout."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from slurmrl.models.config import ModelConfig


def init_tensor(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """The initial float32 value of a parameter.

    As transformers does it: norms multiply by one, biases are zero, the rest is normal with
    standard deviation ``initializer_range``.
    """
    if name.endswith("norm.weight"):
        return torch.zeros(shape) if config.family.norm_offset else torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(_stream(name, seed))
    return torch.empty(shape).normal_(0.0, config.initializer_range, generator=generator)


def _stream(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)
