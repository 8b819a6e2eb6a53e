"""Parameters and optimizer state by their pieces: first values, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from slurmrl.checkpoint.pieces import Part, RoleCheckpoint, Snapshot
from slurmrl.checkpoint.tensors import Entry
from slurmrl.engines import random_state
from slurmrl.errors import CheckpointError
from slurmrl.layout.box import Box
from slurmrl.layout.layout import TensorSpec
from slurmrl.layout.piece import Piece
from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.hf import TensorSource, Weights, as_array
from slurmrl.models.init import init_tensor
from slurmrl.models.shapes import VALUE_HEAD, parameter_shapes

Held = dict[str, tuple[Tensor, list[Piece]]]
"""Flat tensors by storage, and the pieces in each."""


class Reader(Protocol):
    def __call__(self, name: str, box: Box) -> Tensor:
        """Values of a box of a tensor."""
        ...


@torch.no_grad()
def fill(held: Iterable[tuple[Tensor, list[Piece]]], read: Reader) -> None:
    """Write the values of all pieces; what is void becomes zero."""
    for tensor, pieces in held:
        if sum(piece.box.count for piece in pieces) < tensor.numel():
            tensor.zero_()
        for piece in pieces:
            target = tensor[piece.offset : piece.offset + piece.box.count]
            target.copy_(read(piece.name, piece.box).reshape(-1))


def fill_first(
    held: Iterable[tuple[Tensor, list[Piece]]],
    config: ModelConfig,
    head: Head,
    *,
    seed: int,
    source: Path | None,
) -> None:
    """Values from the folder ``source``, else random ones of (seed, name); a value head that the
    source does not have is zero."""
    shapes = parameter_shapes(config, head)

    @lru_cache(maxsize=4)
    def drawn(name: str) -> Tensor:
        return init_tensor(name, shapes[name], config, seed)

    def random(name: str, box: Box) -> Tensor:
        return torch.zeros(box.size) if name == VALUE_HEAD else drawn(name)[box.slices]

    with TensorSource(source) if source is not None else nullcontext() as files:
        fill(held, random if files is None else Weights(files, config, head).read)


def snapshot(
    role: str, rank: int, ranks: int, step: int, specs: Mapping[str, TensorSpec], held: Held
) -> Snapshot:
    """This rank's part of a checkpoint: its tensors as they are then, the random state of now."""
    pieces = tuple(piece for _, own in held.values() for piece in own)
    arrays = (
        Entry(name, TensorSpec(tuple(tensor.shape), "float32"), partial(as_array, tensor))
        for name, (tensor, _) in held.items()
    )
    return Snapshot(
        Part(role, rank, ranks, step, specs, pieces), (*arrays, *random_state.entries())
    )


def open_checkpoint(directory: Path, role: str, specs: Mapping[str, TensorSpec]) -> RoleCheckpoint:
    """Raises CheckpointError where it is of another model."""
    checkpoint = RoleCheckpoint(directory, role)
    theirs = checkpoint.layout.tensors
    for name in (*specs, *theirs):
        if theirs.get(name) != specs.get(name):
            raise CheckpointError(
                f"{directory}: {role}: '{name}' is {theirs.get(name)} in the checkpoint, "
                f"{specs.get(name)} in this run's model"
            )
    return checkpoint


def reader(checkpoint: RoleCheckpoint) -> Reader:
    """Values of a checkpoint's tensors, which are float32."""

    def read(name: str, box: Box) -> Tensor:
        return torch.from_numpy(checkpoint.read(name, box))

    return read
