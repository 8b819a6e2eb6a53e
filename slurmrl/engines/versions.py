"""The whole tensors of a weight version, spread over the ranks of a model.

Every tensor of the model's files has one owner among the ranks that have a part of it, so that all
ranks write at the same time. A move fills the owners' tensors in host memory, in the type and form
of the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import cycle

import torch
import torch.distributed as dist

from slurmrl.engines.host import HostTensors, Specs
from slurmrl.models.hf import as_array
from slurmrl.tensors.checkpoint.export import EXACT, FLOATS
from slurmrl.tensors.checkpoint.tensors import (
    FileTensor,
    Storage,
    TensorEntry,
    TensorSlice,
    file_tensors,
)
from slurmrl.tensors.layout import Box, HeldBox, Holders, Layout, TensorSpec
from slurmrl.tensors.transfer.execute import BoxCopies, Holdings, Mover, Storages
from slurmrl.tensors.transfer.plan import PlacedLayout, plan_move


class OwnedTensors:
    """One rank's tensors of a version. All ranks of the model make it, with equal arguments."""

    def __init__(
        self,
        source: PlacedLayout,
        storage: Storage,
        dtype: str,
        *,
        hosts: Mapping[int, int],
        staging_bytes: int,
        group: dist.ProcessGroup,
        device: torch.device,
        copies: int,
    ) -> None:
        """Plan the move of weights to the ranks that own tensors of the files.

        ``source`` is the layout of the model's parameters, which ``storage`` maps to tensors of
        files. Floating-point tensors become ``dtype``, except for `EXACT` ones. ``hosts`` gives the
        host of each global rank. ``staging_bytes`` bounds the bytes that a rank sends and receives
        at a time.
        ``copies`` results of `take` are valid at the same time.
        """
        self._group, self._device = group, device
        files = file_tensors(source.layout.tensors.items(), storage)
        owners = owners_of(files, source.layout)
        self._source = source
        self._target = PlacedLayout(_whole(files, owners, source.layout, dtype), source.ranks)
        self._plan = plan_move(source, self._target, hosts=hosts, budget=staging_bytes)
        own = source.ranks.index(dist.get_rank())
        self._specs = {
            name: TensorSpec(file.spec.shape, converted(name, file.spec.dtype, dtype))
            for name, file in files.items()
            if owners[name] == own
        }
        shapes: Specs = {
            name: (spec.shape, getattr(torch, spec.dtype)) for name, spec in self._specs.items()
        }
        locked = device.type == "cuda"
        self._copies = cycle([HostTensors(shapes, locked=locked) for _ in range(copies)])
        self._box_copies = BoxCopies(device)

    def take(self, storages: Storages) -> list[TensorEntry]:
        """Return the tensors that this rank owns, copied from the current weights.

        Any thread can write them. ``storages`` are this rank's tensors of the source. Collective
        over the group.
        """
        tensors, rank = next(self._copies), dist.get_rank()
        Mover(
            self._plan,
            rank,
            Holdings(self._source, rank, storages),
            Holdings(self._target, rank, tensors),
            group=self._group,
            device=self._device,
            copies=self._box_copies,
        ).run()
        return [
            TensorEntry(name, spec, partial(as_array, tensors[name]))
            for name, spec in self._specs.items()
        ]


def converted(name: str, stored: str, wanted: str) -> str:
    """Return the type that a tensor of type ``stored`` has in a version."""
    return wanted if stored in FLOATS and not name.endswith(EXACT) else stored


def owners_of(files: Mapping[str, FileTensor], layout: Layout) -> dict[str, int]:
    """Return the rank that owns each tensor.

    The owner is the rank with the fewest bytes so far among the ranks that have a part of the
    tensor. Tensors on few ranks are assigned first, and large ones before small ones.
    """

    @lru_cache(maxsize=1024)  # layers have equal holders
    def holding(holders: Holders, box: Box) -> frozenset[int]:
        parts = (part for part in holders.parts if part.box.intersect(box))
        return frozenset(rank for part in parts for rank in part.ranks)

    near = {
        tensor: frozenset[int]().union(
            *(holding(layout.holders[name], cut.of(spec.shape)) for name, spec, cut in file.shards)
        )
        for tensor, file in files.items()
    }
    used = [0] * layout.ranks
    found: dict[str, int] = {}
    for tensor in sorted(files, key=lambda name: (len(near[name]), -files[name].spec.bytes, name)):
        found[tensor] = min(near[tensor], key=lambda rank: (used[rank], rank))
        used[found[tensor]] += files[tensor].spec.bytes
    return found


def _whole(
    files: Mapping[str, FileTensor], owners: Mapping[str, int], source: Layout, dtype: str
) -> Layout:
    """Return the layout in which owners have the files' tensors as a whole."""
    parts: dict[str, list[HeldBox]] = {name: [] for name in source.tensors}
    for tensor, file in files.items():
        for name, spec, cut in file.shards:
            parts[name].append(_part(owners[tensor], tensor, file, spec, cut))
    specs = {
        name: TensorSpec(spec.shape, converted(name, spec.dtype, dtype))
        for name, spec in source.tensors.items()
    }
    holders = {name: Holders(tuple(held)) for name, held in parts.items()}
    return Layout(specs, holders, source.ranks)


def _part(owner: int, tensor: str, file: FileTensor, spec: TensorSpec, cut: TensorSlice) -> HeldBox:
    """Return the place of a parameter's box in a tensor of the files."""
    offset, strides = cut.offset_and_strides(file.spec.shape, len(spec.shape))
    return HeldBox((owner,), cut.of(spec.shape), f"/{tensor}", offset, strides)
