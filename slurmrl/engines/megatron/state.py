"""Parameters and optimizer state by their pieces: filling them, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from slurmrl.checkpoint.pieces import Part, RoleCheckpoint, Snapshot
from slurmrl.checkpoint.tensors import Entry
from slurmrl.engines import random_state
from slurmrl.engines.first_values import Reader
from slurmrl.layout.box import Box
from slurmrl.layout.layout import TensorSpec
from slurmrl.layout.piece import Piece
from slurmrl.models.hf import as_array

Held = dict[str, tuple[Tensor, list[Piece]]]
"""Flat tensors by storage, and the pieces in each."""


@torch.no_grad()
def fill(held: Iterable[tuple[Tensor, list[Piece]]], read: Reader) -> None:
    """Write the values of all pieces; what is void becomes zero."""
    for tensor, pieces in held:
        if sum(piece.box.count for piece in pieces) < tensor.numel():
            tensor.zero_()
        for piece in pieces:
            target = tensor[piece.offset : piece.offset + piece.box.count]
            target.copy_(read(piece.name, piece.box).reshape(-1))


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


def reader(checkpoint: RoleCheckpoint) -> Reader:
    """Values of a checkpoint's tensors, which are float32."""

    def read(name: str, box: Box) -> Tensor:
        return torch.from_numpy(checkpoint.read(name, box))

    return read
