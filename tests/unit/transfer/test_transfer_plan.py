"""Plans of moves, executed in memory: every element arrives once, before it is sent on, within the
memory limit.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmrl.errors import LayoutError
from slurmrl.tensors.layout import Box, Layout, Shard, TensorSpec, chunk
from slurmrl.tensors.transfer.plan import MovePlan, PlacedLayout, plan_move

WORLD = 6
BUDGET = 4 * 16


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> list[list[Box]]:
    """Return the boxes of each rank. Together they contain every element."""
    if not shape or draw(st.booleans()):
        return [[Box.whole(shape)] for _ in range(ranks)]
    dim = draw(st.integers(0, len(shape) - 1))
    parts = draw(st.integers(1, ranks))
    found = []
    for rank in range(ranks):
        part = chunk((shape[dim],), parts, rank % parts)
        start = (*(0,) * dim, part.start[0], *(0,) * (len(shape) - dim - 1))
        own = Box(start, (*shape[:dim], part.size[0], *shape[dim + 1 :]))
        found.append([own] * draw(st.integers(1, 2)))  # a tied tensor has two storages on a rank
    return found


@st.composite
def sides(draw: st.DrawFn) -> tuple[PlacedLayout, PlacedLayout]:
    shapes = draw(
        st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=3)
    )
    made = []
    for _ in range(2):
        members = draw(st.lists(st.integers(0, WORLD - 1), min_size=1, unique=True).map(sorted))
        shards: list[list[Shard]] = [[] for _ in members]
        for number, shape in enumerate(shapes):
            for rank, own in enumerate(draw(boxes(shape, len(members)))):
                for copy, box in enumerate(own):
                    storage = f"{number}.{copy}"
                    shards[rank].append(Shard.contiguous(f"t{number}", box, storage))
        dtype = draw(st.sampled_from(["float32", "bfloat16"]))
        tensors = {f"t{number}": TensorSpec(shape, dtype) for number, shape in enumerate(shapes)}
        layout = Layout.of(tensors, shards)
        made.append(PlacedLayout(layout, tuple(members)))
    return made[0], made[1]


def elements(box: Box, shape: tuple[int, ...]) -> set[int]:
    return set(np.arange(int(np.prod(shape))).reshape(shape)[box.slices].ravel().tolist())


def having(placed: PlacedLayout) -> dict[tuple[int, str], set[int]]:
    """Return the elements of each tensor on each rank."""
    found: dict[tuple[int, str], set[int]] = defaultdict(set)
    for rank, shard in placed.layout.all_shards():
        shape = placed.layout.tensors[shard.name].shape
        found[placed.ranks[rank], shard.name] |= elements(shard.box, shape)
    return found


@given(sides(), st.integers(1, WORLD))
@settings(max_examples=300, deadline=None)
def test_each_rank_receives_missing_elements_exactly_once(
    pair: tuple[PlacedLayout, PlacedLayout], per_host: int
) -> None:
    source, target = pair
    hosts = {rank: rank // per_host for rank in range(WORLD)}
    plan = plan_move(source, target, hosts=hosts, budget=BUDGET)
    assert plan == plan_move(source, target, hosts=hosts, budget=BUDGET)
    shapes = {name: spec.shape for name, spec in target.layout.tensors.items()}
    held, wanted = having(source), having(target)
    arrived: dict[tuple[int, str], set[int]] = defaultdict(set)
    for rank, cargo in plan.local.items():
        for item in cargo:
            new = elements(item.box, shapes[item.name])
            assert new <= held[rank, item.name]
            assert not new & arrived[rank, item.name]
            arrived[rank, item.name] |= new
    for segment in plan.segments:
        for item in segment.cargo:
            new = elements(item.box, shapes[item.name])
            assert new <= held[segment.chain[0], item.name]
            for rank in segment.chain[1:]:
                assert not new & (arrived[rank, item.name] | held[rank, item.name])
                arrived[rank, item.name] |= new
    assert dict(arrived) == {key: lacking for key, lacking in wanted.items() if lacking}
    check_budget(plan)
    check_hosts(plan, source, hosts)


def check_budget(plan: MovePlan) -> None:
    assert all(segment.bytes <= BUDGET // 4 for segment in plan.segments)
    staged: dict[tuple[int, int], int] = defaultdict(int)
    for segment in plan.segments:
        for number, link in enumerate(pairwise(segment.chain)):
            assert segment.slot + number < plan.slots
            for rank in link:
                staged[rank, segment.slot + number] += segment.bytes
    assert all(count <= BUDGET for count in staged.values())
    assert max(plan.staging().values(), default=0) == max(staged.values(), default=0)


def check_hosts(plan: MovePlan, source: PlacedLayout, hosts: dict[int, int]) -> None:
    """Check that no data comes from another host if a rank of the receiver's host has it."""
    held = having(source)
    shapes = {name: spec.shape for name, spec in source.layout.tensors.items()}
    for segment in plan.segments:
        for sender, receiver in pairwise(segment.chain):
            if hosts[sender] == hosts[receiver]:
                continue
            neighbors = [rank for rank in source.ranks if hosts[rank] == hosts[receiver]]
            for item in segment.cargo:
                new = elements(item.box, shapes[item.name])
                assert not any(new <= held[rank, item.name] for rank in neighbors)


def whole(ranks: tuple[int, ...], shape: tuple[int, ...], dtype: str = "float32") -> PlacedLayout:
    shard = Shard.contiguous("w", Box.whole(shape))
    return PlacedLayout(Layout.of({"w": TensorSpec(shape, dtype)}, ((shard,),) * len(ranks)), ranks)


def test_each_host_receives_a_tensor_once() -> None:
    """Four hosts of four ranks get a tensor from one rank: three links cross hosts."""
    hosts = {rank: rank // 4 for rank in range(16)}
    plan = plan_move(whole((5,), (8,)), whole(tuple(range(16)), (8,)), hosts=hosts, budget=256)
    crossing = [link for link in plan.links() if hosts[link[0]] != hosts[link[1]]]
    assert len(crossing) == 3
    received = sorted((receiver, count) for (_, receiver), count in plan.links().items())
    assert received == [(rank, 32) for rank in range(16) if rank != 5]


def test_sending_ranks_share_the_load() -> None:
    """Each of two holders sends half of what two others lack."""
    tensors = {f"w{n}": TensorSpec((8,), "float32") for n in range(4)}
    shards = tuple(Shard.contiguous(name, Box.whole((8,))) for name in tensors)
    source = PlacedLayout(Layout.of(tensors, (shards, shards)), (0, 1))
    target = PlacedLayout(Layout.of(tensors, (shards,)), (2,))
    plan = plan_move(source, target, hosts={0: 0, 1: 1, 2: 2}, budget=256)
    assert plan.links() == {(0, 2): 64, (1, 2): 64}


def test_weight_move_sends_elements_in_the_narrower_dtype() -> None:
    plan = plan_move(
        whole((0,), (8,)), whole((1,), (8,), "bfloat16"), hosts={0: 0, 1: 0}, budget=64
    )
    assert plan.links() == {(0, 1): 16}


@pytest.mark.parametrize(
    ("source", "target", "budget", "message"),
    [
        (whole((0,), (8,)), whole((1,), (9,)), 64, r"shape \(8,\) in the source and \(9,\)"),
        (
            whole((0,), (8,)),
            whole((1,), (8,), "int64"),
            64,
            "'w' is float32 in the source and int64",
        ),
        (whole((0,), (8,)), whole((1,), (8,)), 12, "budget of 12 bytes is too small"),
        (whole((), (8,)), whole((1,), (8,)), 64, "no rank of the source holds"),
    ],
)
def test_impossible_moves_are_rejected(
    source: PlacedLayout, target: PlacedLayout, budget: int, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        plan_move(source, target, hosts={0: 0, 1: 0}, budget=budget)
