"""Functions that ranks run in the tests of moves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import permutations
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.config.schema.roles import Model
from slurmrl.engines import ENGINES
from slurmrl.engines.base import Engine
from slurmrl.engines.planned import planned_layout
from slurmrl.errors import MoveError
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.tensors.layout import Layout
from slurmrl.tensors.parallel.groups import build
from slurmrl.tensors.transfer.execute import BoxCopies, Holdings, Mover, verify_move
from slurmrl.tensors.transfer.plan import PlacedLayout, Segment, plan_move
from tests.support import megatron_cpu
from tests.support.host_memory import peak_bytes

BUDGET = 4096
"""So small that most tensors travel in several segments."""


PADDING = {"make_vocab_size_divisible_by": 1}


@dataclass(frozen=True)
class Side:
    """A model to place, with the fields of a plan's model."""

    sizes: dict[str, int]
    engine: str = "fsdp"
    ranks: tuple[int, ...] = ()
    """Global ranks; the first ones of the job where empty."""
    dtype: str = "float32"
    trained: bool = False
    expert_sizes: dict[str, int] = field(default_factory=dict)
    virtual_pipeline: int = 1
    sequence_parallel: bool = False
    role: str = "actor"
    head: Head = "lm"


def engines(sides: list[Side], architecture: dict[str, Any]) -> list[Engine | None]:
    """Return the engines of which this rank holds a part. All have the same weights."""
    megatron_cpu.install()
    placed = []
    for number, side in enumerate(sides):
        count = 1
        for size in side.sizes.values():
            count *= size
        ranks = side.ranks or tuple(range(count))
        placed.append(replace(side, ranks=ranks, role=f"model{number}"))
    contexts = build(placed, rank=dist.get_rank(), device=torch.device("cpu"))
    settings = {"architecture": architecture, "model": PADDING}
    return [
        ENGINES.load(side.engine)(
            side.role,
            Model(**settings, dtype=side.dtype),
            head="lm",
            trained=side.trained,
            context=contexts[side.role],
            seed=7,
            total_steps=10,
            source=None,
        )
        if side.role in contexts
        else None
        for side in placed
    ]


def placed_layouts(sides: list[Side], made: list[Engine | None]) -> list[PlacedLayout]:
    """Return the layouts on every rank. The first rank of each model sends its layout."""
    found = []
    for side, engine in zip(sides, made, strict=True):
        own = None if engine is None else PlacedLayout(engine.layout(), engine.context.ranks)
        if engine is not None:
            assert engine.layout().to_json() == _planned(side, engine).to_json()
        every: list[PlacedLayout | None] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        found.append(next(layout for layout in every if layout is not None))
    return found


def _planned(side: Side, engine: Engine) -> Layout:
    """Return the layout that ``slurmrl plan --moves`` computes without an engine."""
    config = engine.config
    assert isinstance(config, ModelConfig)
    model = Model(dtype=side.dtype, model=PADDING)
    return planned_layout(replace(side, ranks=engine.context.ranks), model, config)


def all_pairs(sides: list[Side], architecture: dict[str, Any]) -> dict[tuple[int, int], int]:
    """Move the weights of every side to every other side, whose weights are overwritten before.
    Compare all bits with the target's initial weights. Return the bytes that this rank received.
    """
    made = engines(sides, architecture)
    layouts = placed_layouts(sides, made)
    rank = dist.get_rank()
    for number, side in enumerate(sides):
        if side.engine == "native":  # its weights come only from moves
            _fill(layouts[number], made[number], layouts[0], made[0])
    first = [{} if e is None else {n: t.clone() for n, t in e.storages().items()} for e in made]
    received = {}
    for source, target in permutations(range(len(sides)), 2):
        if sides[target].trained:
            continue
        storages = [{} if e is None else e.storages() for e in (made[source], made[target])]
        for tensor in storages[1].values():
            tensor.detach().fill_(float("nan"))
        held, taken = (
            Holdings(layouts[side], rank, tensors)
            for side, tensors in zip((source, target), storages, strict=True)
        )
        hosts = {member: member // 2 for member in range(dist.get_world_size())}
        plan = plan_move(layouts[source], layouts[target], hosts=hosts, budget=BUDGET)
        assert max(plan.staging().values(), default=0) <= BUDGET
        device = torch.device("cpu")
        Mover(plan, rank, held, taken, group=None, device=device).run()
        verify_move(layouts[source], layouts[target], rank, held, taken, group=None, device=device)
        _compare(first[target], storages[1], layouts[target], rank, sides[source].dtype)
        links = plan.links().items()
        received[source, target] = sum(count for (_, to), count in links if to == rank)
        for name, tensor in storages[1].items():
            tensor.detach().copy_(first[target][name])
    return received


def _fill(target: PlacedLayout, to: Engine | None, source: PlacedLayout, of: Engine | None) -> None:
    rank = dist.get_rank()
    held = Holdings(source, rank, {} if of is None else of.storages())
    taken = Holdings(target, rank, {} if to is None else to.storages())
    plan = plan_move(source, target, hosts=dict.fromkeys(range(8), 0), budget=BUDGET)
    Mover(plan, rank, held, taken, group=None, device=torch.device("cpu")).run()


def _compare(
    first: dict[str, Tensor],
    now: Any,
    layout: PlacedLayout,
    rank: int,
    dtype: str,
) -> None:
    """Check that the elements of the model's tensors are unchanged, except for rounding to
    ``dtype``.
    """
    if rank not in layout.ranks:
        return
    used = {name: torch.zeros(tensor.numel(), dtype=torch.bool) for name, tensor in first.items()}
    for shard in layout.layout.held_by(layout.ranks.index(rank)):
        used[shard.storage].as_strided(shard.box.size, shard.strides, shard.offset).fill_(True)
    assert any(mask.any() for mask in used.values())
    for name, mask in used.items():
        expected = first[name].view(-1)[mask].to(getattr(torch, dtype)).to(first[name].dtype)
        assert torch.equal(now[name].reshape(-1)[mask], expected), name


def allocated(sides: list[Side], architecture: dict[str, Any]) -> tuple[int, int]:
    """Return the peak of bytes that a move allocates on this rank in addition to both models, and
    its planned staging.
    """
    made = engines(sides, architecture)
    layouts, rank = placed_layouts(sides, made), dist.get_rank()
    held, taken = (
        Holdings(layout, rank, {} if engine is None else engine.storages())
        for layout, engine in zip(layouts, made, strict=True)
    )
    plan = plan_move(*layouts, hosts=dict.fromkeys(range(8), 0), budget=4 * BUDGET)
    mover = Mover(plan, rank, held, taken, group=None, device=torch.device("cpu"))
    mover.run()
    with mock.patch("slurmrl.tensors.transfer.plan.ALONE", 256):
        peak = peak_bytes(mover.run)
    return peak, plan.staging().get(rank, 0)


class Coalesced:
    """A batch of operations as NCCL returns it: one object, done when all operations are done."""

    def __init__(self, operations: list[dist.P2POp]) -> None:
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def coalesced(sides: list[Side], architecture: dict[str, Any]) -> None:
    """Move weights with interval operators over a backend that returns one operation per batch."""
    made = engines(sides, architecture)
    layouts, rank = placed_layouts(sides, made), dist.get_rank()
    held, taken = (
        Holdings(layout, rank, {} if engine is None else engine.storages())
        for layout, engine in zip(layouts, made, strict=True)
    )
    plan = plan_move(*layouts, hosts=dict.fromkeys(range(8), 0), budget=BUDGET)
    device = torch.device("cpu")
    copies = BoxCopies(device, kernels=True)
    mover = Mover(plan, rank, held, taken, group=None, device=device, copies=copies)
    real = SimpleNamespace(**vars(dist))
    real.batch_isend_irecv = lambda operations: [Coalesced(operations)]
    with mock.patch("slurmrl.tensors.transfer.execute.dist", real):
        mover.run()
    verify_move(*layouts, rank, held, taken, group=None, device=device)


def moving_average(sides: list[Side], architecture: dict[str, Any], eta: float) -> None:
    """Check that four moves with ``eta``, alternately by torch and by interval operators, equal the
    moving average in float64.
    """
    made = engines(sides, architecture)
    layouts, rank = placed_layouts(sides, made), dist.get_rank()
    source, target = ({} if e is None else e.storages() for e in made)
    fresh = {name: tensor.clone().double() for name, tensor in target.items()}
    for tensor in target.values():
        tensor.detach().mul_(-0.5)
    expected = {name: tensor.clone().double() for name, tensor in target.items()}
    plan = plan_move(*layouts, hosts=dict.fromkeys(range(8), 0), budget=BUDGET)
    held, taken = Holdings(layouts[0], rank, source), Holdings(layouts[1], rank, target)
    device = torch.device("cpu")
    for kernels in (False, True, False, True):
        copies = BoxCopies(device, kernels=kernels)
        Mover(plan, rank, held, taken, group=None, device=device, eta=eta, copies=copies).run()
        for name, values in expected.items():
            values.lerp_(fresh[name], eta)
    for name, values in expected.items():
        torch.testing.assert_close(target[name].double(), values, rtol=1e-6, atol=1e-7)


def planted(sides: list[Side], architecture: dict[str, Any], fault: str) -> str:
    """Return the report of `verify_move` on this rank after a faulty move."""
    made = engines(sides, architecture)
    layouts, rank = placed_layouts(sides, made), dist.get_rank()
    source, target = ({} if e is None else e.storages() for e in made)
    for tensor in target.values():
        tensor.detach().fill_(0)
    held = Holdings(layouts[0], rank, source)
    taken = Holdings(layouts[1], rank, target)
    plan = plan_move(*layouts, hosts=dict.fromkeys(range(8), 0), budget=BUDGET)
    last = dist.get_world_size() - 1
    if fault == "stale replica" and rank == last:  # one copy of a norm missed an update
        next(t for n, t in source.items() if n.endswith("norm.weight")).detach().view(-1)[0] += 1
    if fault == "wrong box":  # the plan takes the rows above those that it should
        plan = replace(plan, segments=tuple(_shifted(segment, held) for segment in plan.segments))
    device = torch.device("cpu")
    Mover(plan, rank, held, taken, group=None, device=device).run()
    if fault == "skipped tie" and rank == last:  # the last stage's copy of the embedding
        target["0.output_layer.weight"].detach().zero_()
    try:
        verify_move(*layouts, rank, held, taken, group=None, device=device)
    except MoveError as error:
        return str(error)
    return ""


def _shifted(segment: Segment, held: Holdings) -> Segment:
    """Return the segment with the sender's boxes one row lower, if the sender has these rows."""
    if dist.get_rank() != segment.chain[0]:
        return segment
    cargo = []
    for item in segment.cargo:
        first, *rest = item.box.start or (0,)
        box = replace(item.box, start=(first - 1, *rest))
        shifted = bool(item.box.start) and held.views(item.name, box)
        cargo.append(replace(item, box=box) if shifted else item)
    return replace(segment, cargo=tuple(cargo))
