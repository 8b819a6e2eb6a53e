"""The architecture and weights of a role: initial and saved values, and their fingerprint.

Initial values come from a Hugging Face folder, or are random.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.config.schema.roles import Model
from slurmrl.errors import UsageError
from slurmrl.models.adapters import shown, summand
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.hf import Weights, as_array, as_tensor, read_values
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.shapes import VALUE_HEAD, stored_shapes
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from slurmrl.tensors.checkpoint.tensors import TensorEntry
from slurmrl.tensors.layout import Box, Index, TensorSpec, blocks
from slurmrl.tensors.transfer.execute import BITS, BLOCK

CPU = "rng/cpu"
CUDA = "rng/cuda"


class BoxReader(Protocol):
    def __call__(self, name: str, box: Box) -> Tensor:
        """Return the values of a box of a tensor."""
        ...


def model_config(role: str, model: Model, source: Path | None) -> ModelConfig | HFConfig:
    """Return the architecture of the ``source`` folder, or else of the configuration.

    Raises UsageError if there is neither.
    """
    kind = HFConfig if model.implementation == "hf" else ModelConfig
    if source is not None:
        return kind.from_hf(model.marked(read_values(source)))
    if model.architecture is None:
        raise UsageError(f"{role}: set a path to start from or an architecture")
    return kind.from_hf(model.marked(model.architecture))


def served_config(role: str, model: Model, source: Path | None) -> ModelConfig | HFConfig:
    """Return `model_config` with all keys for servers. Raises UsageError for an unknown family."""
    config = model_config(role, model, source)
    if not isinstance(config, HFConfig):
        return config
    from slurmrl.models.hf_files import complete  # transformers takes seconds to import

    return complete(config)


@contextmanager
def initial_weights(
    config: ModelConfig, head: Head, *, seed: int, source: Path | None, keep: int = 1
) -> Iterator[BoxReader]:
    """Yield a reader of boxes of the built-in decoder's parameters and constants.

    The parameters come from the folder ``source``. Without the folder, parameters are random values
    that depend only on (seed, name). The whole model is never in memory. The reader raises
    UsageError for weights of the folder that are not finite.

    A value head that the source lacks is zero, so that values start at zero. Random tensors are
    made as a whole; the last ``keep`` of them are cached for further boxes.
    """
    if source is not None:
        yield Weights(source, config, head).read_finite
        return
    shapes = stored_shapes(config, head)

    @lru_cache(maxsize=keep)
    def initial(name: str) -> Tensor:
        return init_tensor(name, shapes[name], config, seed)

    def random(name: str, box: Box) -> Tensor:
        return torch.zeros(box.size) if name == VALUE_HEAD else initial(name)[box.slices]

    yield random


def init_tensor(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """Return the initial float32 value of a parameter, which depends only on (seed, name).

    As in transformers, norms are the identity and biases zero. All other parameters are normally
    distributed with standard deviation ``initializer_range``.
    """
    if name.endswith("norm.weight"):
        return torch.zeros(shape) if config.family.norm_offset else torch.ones(shape)
    if name.endswith((".bias", "_bias")):
        return torch.zeros(shape)
    generator = generator_of(name, seed)
    return torch.empty(shape).normal_(0.0, config.initializer_range, generator=generator)


def generator_of(name: str, seed: int) -> torch.Generator:
    """Return the random generator of a parameter's initial values."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))


def random_entries() -> Iterator[TensorEntry]:
    """Yield the current random state."""
    states = {CPU: torch.get_rng_state()}
    if torch.cuda.is_available():
        states[CUDA] = torch.cuda.get_rng_state()
    for name, state in states.items():
        yield TensorEntry(name, TensorSpec(tuple(state.shape), "uint8"), partial(as_array, state))


def restore_random(checkpoint: RoleCheckpoint, rank: int, ranks: int) -> None:
    """Restore this rank's random state.

    If a different number of ranks, or ranks without a GPU, wrote the checkpoint, seed from the step
    and the rank instead.
    """
    torch.manual_seed(checkpoint.step * ranks + rank)
    if checkpoint.ranks != ranks:
        return
    torch.set_rng_state(_state(checkpoint, rank, CPU))
    if torch.cuda.is_available() and checkpoint.has_array(rank, CUDA):
        torch.cuda.set_rng_state(_state(checkpoint, rank, CUDA))


def _state(checkpoint: RoleCheckpoint, rank: int, name: str) -> Tensor:
    return torch.from_numpy(np.array(checkpoint.array(rank, name)))


@torch.no_grad()
def fill_saved(target: Tensor, checkpoint: RoleCheckpoint, name: str, box: Box) -> None:
    """Write a box of a tensor into ``target``, a tensor of the box's shape.

    Raises CheckpointError.
    """
    dtype = checkpoint.layout.tensors[name].dtype
    for block, values in checkpoint.blocks(name, box):
        target[block.inside(box)].copy_(as_tensor(values, dtype))


class Fingerprint:
    """Fingerprint of tensors, as a sum over boxes and ranks (see `slurmrl.models.adapters`)."""

    def __init__(self, shapes: Mapping[str, Index], device: torch.device) -> None:
        """Start at zero. ``shapes`` has whole shapes; ``device`` computes block by block."""
        self._shapes = shapes
        self._total = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, name: str, box: Box, values: Tensor) -> None:
        """Add the ``values`` of a parameter's box. Add each element only once."""
        device = self._total.device
        count = partial(torch.arange, device=device)
        for block in blocks(Box.whole(box.size), BLOCK):
            start = tuple(map(sum, zip(box.start, block.start, strict=True)))
            part = values[block.slices].to(device).reshape(-1)
            bits = part.view(BITS[part.element_size()])
            place = Box(start, block.size)
            self._total += summand(name, self._shapes[name], place, bits, count)

    def add_up(self, group: dist.ProcessGroup) -> None:
        """Replace the sum of this rank by the sum over the ranks of a group. Collective."""
        dist.all_reduce(self._total, group=group)

    def __str__(self) -> str:
        return shown(int(self._total))
