"""Reallocations, which move weights of one model of the plan into the layout of another model.

`Residence` keeps offloaded models in device memory only while they are used.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from slurmrl.engines.base import Engine
from slurmrl.errors import MoveError
from slurmrl.plan.model import ModelPlan, Plan, Reallocation
from slurmrl.tensors.layout import Layout
from slurmrl.tensors.ops.collectives import broadcast_bytes
from slurmrl.tensors.parallel.groups import Activity
from slurmrl.tensors.transfer.execute import BoxCopies, Holdings, Mover, Storages, verify_move
from slurmrl.tensors.transfer.plan import MovePlan, PlacedLayout, plan_move

Verify = Literal["first", "always", "never"]


@dataclass(frozen=True)
class PreparedMove:
    """A reallocation in which this rank takes part."""

    hook: Reallocation
    engines: tuple[Engine | None, Engine | None]
    """The engines of source and target; None if this rank has no part of that model."""
    layouts: tuple[PlacedLayout, PlacedLayout]
    plan: MovePlan
    group: dist.ProcessGroup
    device: torch.device
    copies: BoxCopies

    def run(self, *, verify: bool) -> None:
        """Execute the move. Collective over the ranks of both models.

        Raises MoveError on every rank if ``verify`` finds a difference. Moving averages are not
        verified.
        """
        rank = dist.get_rank()
        # Get the storages again: an engine may have replaced them since the last move.
        held, taken = (
            Holdings(layout, rank, _storages(engine))
            for layout, engine in zip(self.layouts, self.engines, strict=True)
        )
        eta = self.hook.eta
        Mover(
            self.plan,
            rank,
            held,
            taken,
            group=self.group,
            device=self.device,
            eta=eta,
            copies=self.copies,
        ).run()
        if verify and eta == 1.0:
            try:
                verify_move(*self.layouts, rank, held, taken, group=self.group, device=self.device)
            except MoveError as error:
                raise MoveError(f"{self.hook}: {error}") from error


class Reallocations:
    """Execute a plan's reallocations. Skip a move if the target has the newest weights.

    Every rank reports every call in the plan's order, even if it takes no part in the call. Thus
    all ranks know without communication which weights have changed.
    """

    def __init__(
        self, moves: Mapping[Reallocation, PreparedMove], verify: Verify, activity: Activity
    ) -> None:
        self._moves = moves
        self._verify = verify
        self._activity = activity
        self._trained: dict[str, int] = {}
        """Number of times that each model was trained in this incarnation."""
        self._arrived: dict[str, int] = {}
        """Mapping from each target with weights to its source's `_trained` at the last move."""
        self._verified: set[Reallocation] = set()

    def run(self, hook: Reallocation) -> None:
        """Move the weights unless the target already has the newest weights. Raises MoveError."""
        version = self._trained.get(hook.source, 0)
        if self._arrived.get(hook.target) == version:
            return
        first = hook not in self._verified
        if (move := self._moves.get(hook)) is not None:
            self._activity.phase(f"moving weights from {hook.source} to {hook.target}")
            move.run(verify=self._verify == "always" or (self._verify == "first" and first))
        self._arrived[hook.target] = version
        self._verified.add(hook)

    def trained(self, model: str) -> None:
        """Record that the weights of a model have changed."""
        self._trained[model] = self._trained.get(model, 0) + 1

    def discarded(self, model: str) -> None:
        """Record that a model has lost the weights that a move gave to it."""
        self._arrived.pop(model, None)


def prepare(
    plan: Plan,
    engines: Mapping[str, Engine],
    rank: int,
    device: torch.device,
    *,
    staging_bytes: int,
    timeout: timedelta,
) -> dict[Reallocation, PreparedMove]:
    """Return this rank's part of each reallocation of the plan. Collective over all ranks.

    ``timeout`` is the time-out of a collective. ``staging_bytes`` limits the buffers of a rank.
    """
    prepared = {}
    for hook in plan.reallocations:
        sides = plan.models[hook.source], plan.models[hook.target]
        ranks = sorted({member for side in sides for member in side.ranks})
        group = dist.new_group(ranks, timeout=timeout)
        if rank not in ranks:
            continue
        source, target = (_placed(engines, side, ranks, group, device) for side in sides)
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # Connect all ranks.
        per_host = plan.trainers.workers_per_host
        hosts = {member: member // per_host for member in ranks}
        prepared[hook] = PreparedMove(
            hook,
            (engines.get(hook.source), engines.get(hook.target)),
            (source, target),
            plan_move(source, target, hosts=hosts, budget=staging_bytes),
            group,
            device,
            BoxCopies(device),
        )
    return prepared


def _placed(
    engines: Mapping[str, Engine],
    model: ModelPlan,
    ranks: list[int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> PlacedLayout:
    """Return a model's layout on all ``ranks`` of the group. Collective.

    Ranks without a part of the model receive the layout from the model's first rank.
    """
    engine = engines.get(model.role)
    layout = None if engine is None else engine.layout()
    if len(model.ranks) < len(ranks):
        content = b"" if layout is None else json.dumps(layout.to_json()).encode()
        content = broadcast_bytes(content, group, device, source=ranks.index(model.ranks[0]))
        layout = layout or Layout.from_json(json.loads(content))
    assert layout is not None, "every rank of the group holds a part of the model"
    return PlacedLayout(layout, model.ranks)


def _storages(engine: Engine | None) -> Storages:
    return {} if engine is None else engine.storages()


class Residence:
    """Keeps engines of ``offloaded`` models out of device memory between their calls.

    A model with ``moved`` weights loses the weights when it leaves device memory. Such models stay
    until another model needs the memory, because a step may use them several times.
    """

    def __init__(
        self, engines: Mapping[str, Engine], offloaded: Collection[str], moved: Collection[str] = ()
    ) -> None:
        self._engines = {name: engines[name] for name in engines if name in offloaded}
        self._moved = frozenset(moved) & frozenset(offloaded)
        self._staying: set[str] = set()
        """Models that remain in device memory on their ranks. The set is equal on all ranks."""
        for engine in self._engines.values():
            engine.offload()

    @contextmanager
    def using(self, *models: str) -> Iterator[None]:
        """Keep models of which this rank has parts in device memory during the block.

        After an exception, the models remain in device memory.
        """
        for name in models:
            if name in self._engines:
                self._engines[name].onload()
        yield
        self._staying.update(self._moved.intersection(models))
        self._offload(name for name in models if name not in self._moved)

    def make_room(self, *needed: str) -> Collection[str]:
        """Offload all remaining models that are not ``needed``; return the offloaded models."""
        left = self._staying.difference(needed)
        self._staying -= left
        self._offload(left)
        return left

    def _offload(self, models: Iterable[str]) -> None:
        for name in models:
            if name in self._engines:
                self._engines[name].offload()
