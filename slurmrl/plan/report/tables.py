"""Tables of a plan: the placement of each rank, and the process groups.

They are derived from the plan, so every process of a run computes the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from slurmrl.plan.model import ModelPlan, Plan
from slurmrl.run.worlds import TRAINERS
from slurmrl.tensors.parallel.topology import ProcessTopology

Wanted: TypeAlias = tuple[str, tuple[int, ...]]
"""The use of a group and its ranks."""


@dataclass(frozen=True)
class Row:
    """One rank of a model. ``gpu`` is its number on the host of its job or task."""

    rank: int
    place: int
    host: int
    gpu: int
    coordinates: dict[str, int]
    expert_coordinates: dict[str, int]


@dataclass(frozen=True)
class ProcessGroup:
    """``uses`` are ``global``, ``model NAME``, and ``NAME AXIS`` (``NAME expert AXIS`` of the
    experts' own grid). Uses of the same ranks share one group."""

    uses: tuple[str, ...]
    ranks: tuple[int, ...]


def topology(model: ModelPlan) -> ProcessTopology:
    return ProcessTopology(tuple(model.sizes), tuple(model.sizes.values()))


def expert_topology(model: ModelPlan) -> ProcessTopology | None:
    """The experts' own grid over the same ranks."""
    if not model.expert_sizes:
        return None
    return ProcessTopology(tuple(model.expert_sizes), tuple(model.expert_sizes.values()))


def rows(plan: Plan, model: ModelPlan) -> list[Row]:
    """The rows of a model's ranks, in their order."""
    group, grid, experts = plan.group(model.group), topology(model), expert_topology(model)
    table = []
    held = len(model.ranks) // len(set(model.ranks))  # ranks of one worker, adjacent
    for rank, place in enumerate(model.ranks):
        host, worker = divmod(place, group.workers_per_host)
        gpu = worker * held + rank % held
        coordinates = grid.coordinates(rank)
        own = experts.coordinates(rank) if experts else {}
        table.append(Row(rank, place, host, gpu, coordinates, own))
    return table


def process_groups(plan: Plan) -> list[ProcessGroup]:
    """The groups of torch.distributed, without those of one rank, in the order in which every rank
    of the fixed job creates them."""
    uses: dict[tuple[int, ...], list[str]] = {}
    for use, ranks in _wanted(plan):
        if len(ranks) > 1:
            uses.setdefault(ranks, []).append(use)
    return [ProcessGroup(tuple(named), ranks) for ranks, named in uses.items()]


def _wanted(plan: Plan) -> Iterator[Wanted]:
    yield "global", tuple(range(plan.trainers.world_size))
    for name, model in plan.models_of(TRAINERS).items():
        yield f"model {name}", model.ranks
        yield from _of_axes(model, topology(model), name)
        experts = expert_topology(model)
        if experts is not None:
            yield from _of_axes(model, experts, f"{name} expert")


def _of_axes(model: ModelPlan, grid: ProcessTopology, name: str) -> Iterator[Wanted]:
    for axis, size in zip(grid.axes, grid.sizes, strict=True):
        if size == 1:
            continue
        for members in grid.groups(axis):
            yield f"{name} {axis}", tuple(model.ranks[index] for index in members)


def split_over_hosts(plan: Plan) -> list[str]:
    """Models with a tensor-parallel group on several hosts that would fit on one."""
    split = []
    for name, model in plan.models.items():
        per_host, size = plan.group(model.group).workers_per_host, model.sizes["tp"]
        if size == 1 or size > per_host:
            continue
        groups = topology(model).groups("tp")
        if any(len({model.ranks[i] // per_host for i in members}) > 1 for members in groups):
            split.append(name)
    return split
