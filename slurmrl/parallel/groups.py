"""Process groups of each model's layout. Nothing is global: a ParallelContext is passed on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from slurmrl.parallel.topology import ProcessTopology


class Placement(Protocol):
    """What is needed of a model's plan: ``ranks[i]`` is the global rank of the model's i-th rank,
    in row-major order of the axes in ``sizes``."""

    @property
    def role(self) -> str: ...
    @property
    def sizes(self) -> Mapping[str, int]: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class ParallelContext:
    """One model's place in the process world, as this rank sees it."""

    role: str
    device: torch.device
    rank: int
    """This process's rank within the model, an index of ``ranks``."""
    ranks: tuple[int, ...]
    """Global ranks of the model."""
    topology: ProcessTopology
    groups: Mapping[str, dist.ProcessGroup]
    """The group of each axis that this rank belongs to."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def dp_rank(self) -> int:
        return self.topology.coordinate(self.rank, "dp")

    @property
    def dp_size(self) -> int:
        return self.topology.size("dp")

    def group(self, axis: str) -> dist.ProcessGroup:
        """The peers along an axis; KeyError for an axis that the layout does not have."""
        return self.groups[axis]

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The one-dim mesh ``("dp",)`` that parameters are sharded over."""
        return DeviceMesh.from_group(self.group("dp"), self.device.type, mesh_dim_names=("dp",))


def build(
    models: Iterable[Placement], *, rank: int, device: torch.device
) -> dict[str, ParallelContext]:
    """The contexts, by role, of the models that the global rank ``rank`` holds a part of.

    Collective over the whole process world: every rank calls it with the same models in plan
    order, whether it holds them or not. Models that need the same ranks share a group.
    """
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    contexts: dict[str, ParallelContext] = {}
    for model in models:
        topology = topology_of(model)
        groups: dict[str, dist.ProcessGroup] = {}
        for axis in topology.axes:
            for members in topology.groups(axis):
                peers = tuple(model.ranks[index] for index in members)
                if peers not in made:
                    made[peers] = dist.new_group(list(peers))
                if rank in peers:
                    groups[axis] = made[peers]
        if rank in model.ranks:
            own = model.ranks.index(rank)
            contexts[model.role] = ParallelContext(
                model.role, device, own, model.ranks, topology, groups
            )
    return contexts


def topology_of(model: Placement) -> ProcessTopology:
    """The grid of a model: its axes of more than one rank in the plan's order, and ``dp`` always.

    ValueError for sizes that do not make up the number of ranks.
    """
    sizes = {"dp": 1, **model.sizes} if "dp" not in model.sizes else model.sizes
    axes = [axis for axis, size in sizes.items() if size > 1 or axis == "dp"]
    topology = ProcessTopology(axes, [sizes[axis] for axis in axes])
    if topology.world_size != len(model.ranks):
        raise ValueError(
            f"{model.role}: sizes {dict(model.sizes)} need {topology.world_size} ranks, "
            f"the plan gives {len(model.ranks)}"
        )
    return topology
