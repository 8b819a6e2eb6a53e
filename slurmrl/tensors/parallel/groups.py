"""Process groups of each model's layout, and this process's activity. Nothing is global.

The working thread updates the activity; the thread that sends heartbeats reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from slurmrl.tensors.parallel.topology import (
    JOINT,
    Folded,
    ModelRanks,
    ProcessTopology,
    expert_topology,
    topology_of,
)

OF_ONE: Final = ("dp", "shard")
"""Axes that have a group even if it contains only one rank."""
COMBINED: Final = {
    "tp+cp": ("tp", "cp"),
    "tp+pp": ("tp", "pp"),
    "tp+dp+cp": ("tp", "dp", "cp"),
    "all": ("pp", "dp", "cp", "tp"),
    "alone": (),
}
"""Axes of additional groups, even of one rank, for engines with a separate grid of experts."""
OF_EXPERTS: Final = {
    "ep": ("ep",),
    "etp": ("tp",),
    "edp": ("dp",),
    "etp+ep": ("tp", "ep"),
    "etp+ep+pp": ("tp", "ep", "pp"),
}
"""Axes of the groups in the experts' grid."""
FOLDING: Final = ("megatron",)
"""Engines that need `COMBINED` and `OF_EXPERTS`."""
IDLE = ""
"""Name of the call while a rank waits for the master's next message."""


class Awaited(NamedTuple):
    what: str
    rank: int
    """Rank for which this rank waits."""
    since: float
    """Start of the wait, by the clock of `Activity`."""


class Doing(NamedTuple):
    call: str
    """A call of the dataflow graph, ``load``, ``save`` or ``start``; `IDLE` between calls."""
    step: int | None
    since: float
    """Start of the call, by the clock of `Activity`."""
    phase: str = ""
    part: int = 0
    """Number of the micro-batch, from 1; 0 outside of micro-batches."""
    parts: int = 0
    awaited: Awaited | None = None


class Activity:
    """The activity of one rank. An update replaces the value, so that other threads can read it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._doing = Doing("start", None, clock())

    def begin(self, call: str, step: int | None = None) -> None:
        self._doing = Doing(call, step, self._clock())

    def end(self) -> None:
        self._doing = Doing(IDLE, None, self._clock())

    def phase(self, name: str, part: int = 0, parts: int = 0) -> None:
        """Set the phase of the current call, and its micro-batch ``part`` of ``parts`` if any."""
        self._doing = self._doing._replace(phase=name, part=part, parts=parts, awaited=None)

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Return a context that sets another phase of the current call, then restores the phase."""
        before = self._doing
        self.phase(name)
        try:
            yield
        finally:
            self._doing = before

    def await_from(self, rank: int, what: str) -> None:
        """Record that the current call waits for ``what`` of ``rank``, until its next phase."""
        self._doing = self._doing._replace(awaited=Awaited(what, rank, self._clock()))

    def current(self) -> tuple[Doing, float]:
        """Return the activity and the duration of its call so far, in seconds."""
        doing = self._doing
        return doing, self.age(doing.since)

    def age(self, since: float) -> float:
        """Return the seconds since a time of this clock."""
        return self._clock() - since


@dataclass(frozen=True)
class ParallelContext:
    """The ranks and process groups of one model, as this rank sees them."""

    role: str
    device: torch.device
    rank: int
    """Rank of this process within the model, an index of ``ranks``."""
    ranks: tuple[int, ...]
    """Ranks of the model in the world."""
    topology: ProcessTopology
    groups: Mapping[str, dist.ProcessGroup]
    """This rank's group along each axis and each entry of `JOINT`."""
    experts: ProcessTopology | None = None
    """Separate grid of the experts over the same ranks; None if there is none."""
    virtual_pipeline: int = 1
    """Number of model chunks of each pipeline stage."""
    sequence_parallel: bool = False
    """Whether activations between tensor-parallel blocks are split along the sequence."""
    activity: Activity = field(default_factory=Activity, compare=False)
    """Current activity of this rank."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def dp_rank(self) -> int:
        return self.topology.coordinate(self.rank, "dp")

    @property
    def dp_size(self) -> int:
        return self.topology.size("dp")

    def axis_rank(self, axis: str) -> int:
        """Return this rank's coordinate; 0 along an axis that the layout does not have."""
        return self.topology.coordinate(self.rank, axis) if axis in self.topology.axes else 0

    def axis_size(self, axis: str) -> int:
        """Return the size of an axis; 1 for an axis that the layout does not have."""
        return self.topology.size(axis) if axis in self.topology.axes else 1

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first with its samples, which reports for the other ranks."""
        return all(self.axis_rank(axis) == 0 for axis in self.topology.axes if axis != "dp")

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return this rank's group along an axis or an entry of `JOINT`.

        Raises KeyError for an axis that the layout does not have.
        """
        return self.groups[axis]

    @cached_property
    def mesh(self) -> DeviceMesh:
        """One-dim mesh of the data- and context-parallel ranks, which shard parameters."""
        return DeviceMesh.from_group(
            self.group("shard"), self.device.type, mesh_dim_names=("shard",)
        )


def build(
    models: Iterable[ModelRanks],
    *,
    rank: int,
    device: torch.device,
    timeout: timedelta | None = None,
    activity: Activity | None = None,
) -> dict[str, ParallelContext]:
    """Return a mapping from roles to contexts of models of which world rank ``rank`` has a part.

    Collective over the world: every rank passes the same models in plan order, even if it has no
    part of them. Models on the same ranks share process groups. ``timeout`` is the time limit of a
    collective (None: the default of the backend, which may differ from the world's limit).
    """
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    contexts: dict[str, ParallelContext] = {}
    for model in models:
        topology = topology_of(model)
        groups: dict[str, dist.ProcessGroup] = {}
        for axis, members in _families(model, topology):
            peers = tuple(model.ranks[index] for index in members)
            if peers not in made:
                made[peers] = dist.new_group(list(peers), timeout=timeout)
            if rank in peers:
                groups[axis] = made[peers]
        if rank in model.ranks:
            own = model.ranks.index(rank)
            folded = model if isinstance(model, Folded) else None
            contexts[model.role] = ParallelContext(
                model.role,
                device,
                own,
                model.ranks,
                topology,
                groups,
                experts=expert_topology(model),
                virtual_pipeline=folded.virtual_pipeline if folded else 1,
                sequence_parallel=folded.sequence_parallel if folded else False,
                activity=activity or Activity(),
            )
    return contexts


def _families(model: ModelRanks, topology: ProcessTopology) -> Iterator[tuple[str, list[int]]]:
    """Yield the name of each group, and its members as ranks within the model."""
    for axis, along in {**{axis: (axis,) for axis in topology.axes}, **JOINT}.items():
        for members in topology.blocks(along):
            if len(members) > 1 or axis in OF_ONE:
                yield axis, members
    if not isinstance(model, Folded) or model.engine not in FOLDING:
        return
    for axis, along in COMBINED.items():
        yield from ((axis, members) for members in topology.blocks(along))
    if "pp" in topology.axes:
        yield from (("ends", [stages[0], stages[-1]]) for stages in topology.blocks(("pp",)))
    experts = expert_topology(model)
    if experts is not None:
        for axis, along in OF_EXPERTS.items():
            yield from ((axis, members) for members in experts.blocks(along))
