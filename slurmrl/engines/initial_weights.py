"""The architecture and initial weights of a model: from a Hugging Face folder, or random."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from slurmrl.config.schema.model import Model
from slurmrl.errors import UsageError
from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.hf import Weights, open_tensors, read_values
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.shapes import VALUE_HEAD, parameter_shapes
from slurmrl.tensors.layout import Box


class BoxReader(Protocol):
    def __call__(self, name: str, box: Box) -> Tensor:
        """Values of a box of a tensor."""
        ...


def model_config(role: str, model: Model, source: Path | None) -> ModelConfig | HFConfig:
    """The architecture of the source folder, or else of the run's config."""
    kind = HFConfig if model.implementation == "hf" else ModelConfig
    if source is not None:
        return kind.from_hf(read_values(source))
    if model.architecture is None:
        raise UsageError(f"{role}: set a path to start from or an architecture")
    return kind.from_hf(model.architecture)


@contextmanager
def initial_weights(
    config: ModelConfig, head: Head, *, seed: int, source: Path | None, keep: int = 1
) -> Iterator[BoxReader]:
    """Yield a reader of boxes of the built-in decoder's parameters.

    The parameters come from the folder ``source``. Without it, they are random values that depend
    only on (seed, name). The whole model is never in memory. The reader raises UsageError for
    weights of the folder that are not finite.

    A value head that the source lacks is zero, so that values start at zero. Random tensors are
    made whole; the last ``keep`` of them are cached for further boxes.
    """
    if source is not None:
        with open_tensors(source) as files:
            yield Weights(files, config, head).read_finite
        return
    shapes = parameter_shapes(config, head)

    @lru_cache(maxsize=keep)
    def drawn(name: str) -> Tensor:
        return init_tensor(name, shapes[name], config, seed)

    def random(name: str, box: Box) -> Tensor:
        return torch.zeros(box.size) if name == VALUE_HEAD else drawn(name)[box.slices]

    yield random


def init_tensor(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """The initial float32 value of a parameter: the same for a (seed, name) on every rank.

    As in transformers, norms are the identity, biases zero, and all others normal with standard
    deviation ``initializer_range``.
    """
    if name.endswith("norm.weight"):
        return torch.zeros(shape) if config.family.norm_offset else torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    generator = generator_of(name, seed)
    return torch.empty(shape).normal_(0.0, config.initializer_range, generator=generator)


def generator_of(name: str, seed: int) -> torch.Generator:
    """The generator of a parameter's initial values."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))
