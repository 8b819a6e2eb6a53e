"""Saving and loading an engine's shards, moments, step count and random state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slurmrl.checkpoint.pieces import Part, RoleCheckpoint, Snapshot
from slurmrl.checkpoint.tensors import Entry
from slurmrl.errors import CheckpointError
from slurmrl.layout.copy import Array
from slurmrl.layout.layout import Layout, TensorSpec

CPU_RANDOM = "rng/cpu"
CUDA_RANDOM = "rng/cuda"


def snapshot(
    role: str, rank: int, step: int, layout: Layout, tensors: Mapping[str, Tensor]
) -> Snapshot:
    """This rank's part of a checkpoint; ``tensors`` are its chunks, by their names in ``layout``.

    What is written is what they hold then; the random state is that of now.
    """
    part = Part(role, rank, layout.ranks, step, layout.tensors, layout.pieces[rank])
    entries = (
        Entry(
            piece.name,
            TensorSpec(piece.box.size, layout.tensors[piece.name].dtype),
            partial(_to_numpy, tensors[piece.name]),
        )
        for piece in part.pieces
    )
    return Snapshot(part, (*entries, *_random_state()))


@torch.no_grad()
def load(
    directory: Path, role: str, rank: int, layout: Layout, tensors: Mapping[str, Tensor]
) -> int:
    """Fill this rank's chunks and set its random state; returns the optimizer steps made.

    A checkpoint of another number of ranks has no random state for this rank: it gets one from
    the step and its rank.
    """
    checkpoint = RoleCheckpoint(directory, role)
    if dict(checkpoint.layout.tensors) != dict(layout.tensors):
        raise CheckpointError(f"{directory}: {_difference(role, checkpoint.layout, layout)}")
    for piece in layout.pieces[rank]:
        values = checkpoint.read(piece.name, piece.box)
        target = tensors[piece.name]
        target.copy_(_to_torch(values, target.dtype))
    if checkpoint.ranks == layout.ranks:
        _restore_random_state(checkpoint, rank)
    else:
        torch.manual_seed(checkpoint.step * layout.ranks + rank)
    return checkpoint.step


def _difference(role: str, theirs: Layout, ours: Layout) -> str:
    for name in (*ours.tensors, *theirs.tensors):
        found, wanted = theirs.tensors.get(name), ours.tensors.get(name)
        if found != wanted:
            return f"{role}: '{name}' is {found} in the checkpoint, {wanted} in this run's model"
    raise AssertionError("the layouts are equal")


def _random_state() -> Iterator[Entry]:
    states = {CPU_RANDOM: torch.get_rng_state()}
    if torch.cuda.is_available():
        states[CUDA_RANDOM] = torch.cuda.get_rng_state()
    for name, state in states.items():
        yield Entry(name, TensorSpec(tuple(state.shape), "uint8"), partial(_to_numpy, state))


def _restore_random_state(checkpoint: RoleCheckpoint, rank: int) -> None:
    torch.set_rng_state(torch.from_numpy(np.array(checkpoint.array(rank, CPU_RANDOM))))
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(np.array(checkpoint.array(rank, CUDA_RANDOM))))


def _to_numpy(tensor: Tensor) -> Array:
    host = tensor.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        bits: Array = host.view(torch.int16).numpy().view(np.uint16)
        return bits
    values: Array = host.numpy()
    return values


def _to_torch(values: Array, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
