from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmrl.config.allocation import Allocation, ExpertSizes, parse
from slurmrl.config.allocation.allocation import AXIS_OF, BACKENDS
from slurmrl.errors import AllocationError
from slurmrl.plan.build import AXIS_ORDER, expert_sizes
from slurmrl.plan.model import ModelPlan
from slurmrl.plan.plan_values import expert_topology, topology

ONES = {"dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1}


@pytest.mark.parametrize(
    ("text", "backend", "name", "sizes", "world_size", "canonical"),
    [
        ("fsdp:d2", "fsdp", "", {"dp": 2}, 2, "fsdp:d2"),
        ("fsdp:d1", "fsdp", "", {}, 1, "fsdp:d1"),
        (" fsdp : d 4\tt2 ", "fsdp", "", {"dp": 4, "tp": 2}, 8, "fsdp:d4t2"),
        ("fsdp:d8c1t1p1e1", "fsdp", "", {"dp": 8}, 8, "fsdp:d8"),
        ("fsdp[actor]:d4", "fsdp", "actor", {"dp": 4}, 4, "fsdp[actor]:d4"),
        ("megatron:p2t4d2", "megatron", "", {"dp": 2, "tp": 4, "pp": 2}, 16, "megatron:d2t4p2"),
        ("archon:d4t2c2", "fsdp", "", {"dp": 4, "tp": 2, "cp": 2}, 16, "fsdp:d4t2c2"),
        ("archon:d4e2", "megatron", "", {"dp": 4, "ep": 2}, 4, "megatron:d4e2"),
        ("archon:d2p2", "megatron", "", {"dp": 2, "pp": 2}, 4, "megatron:d2p2"),
        ("sglang:d4t2p2", "sglang", "", {"dp": 4, "tp": 2, "pp": 2}, 16, "sglang:d4t2p2"),
    ],
)
def test_allocation_string_gives_engine_and_axes(
    text: str, backend: str, name: str, sizes: dict[str, int], world_size: int, canonical: str
) -> None:
    allocation = parse(text)
    assert allocation == Allocation(backend, name, ONES | sizes)
    assert allocation.world_size == world_size
    assert str(allocation) == canonical


@pytest.mark.parametrize(
    ("text", "position", "rule"),
    [
        ("", 1, "expected a backend; allowed: fsdp"),
        (":d2", 1, "expected a backend"),
        ("fdsp:d2", 1, "did you mean 'fsdp'?"),
        ("FSDP:d4", 1, "unknown backend 'FSDP'"),
        ("fsdp", 5, "expected ':'"),
        ("sglang.d2t2p1", 7, "expected ':'"),
        ("fsdp:", 6, "expected a dimension of fsdp: d, t, c"),
        ("fsdp:d", 7, "needs an integer from 1"),
        ("fsdp:d0", 7, "needs an integer from 1"),
        ("fsdp:d04", 7, "without leading zeros"),
        ("fsdp:d1.5", 8, "expected a dimension"),
        ("fsdp:d99999999", 7, "needs an integer from 1 to 1000000"),
        ("fsdp:d4d2", 8, "dimension 'd' is repeated"),
        ("fsdp:d2p2", 8, "fsdp has no dimension 'p'; allowed: d, t, c"),
        ("sglang:d4c2", 10, "sglang has no dimension 'c'"),
        ("vllm: d4 e2", 10, "vllm has no dimension 'e'"),
        ("fsdp:d2+fsdp:d2", 8, "expected a single allocation"),
        ("fsdp[]:d2", 6, "expected a name"),
        ("fsdp[a:d2", 7, "expected ']'"),
        ("fsdp:d2)", 8, "expected '+'"),
        ("fsdp:d\u0662", 7, "needs an integer"),
    ],
)
def test_errors_point_at_the_character_and_list_allowed_values(
    text: str, position: int, rule: str
) -> None:
    with pytest.raises(AllocationError) as caught:
        parse(text)
    first, shown, caret = str(caught.value).splitlines()
    assert f"at character {position} " in first
    assert rule in first
    assert shown == f"    {text}"
    assert caret.index("^") == 4 + position - 1
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


def divisors(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from([size for size in range(1, number + 1) if number % size == 0])


@st.composite
def allocations(draw: st.DrawFn) -> Allocation:
    """Draw allocations that a backend supports, with one or both parts."""
    backend = draw(st.sampled_from(list(BACKENDS.values())))
    name = draw(st.sampled_from(["", "a", "actor_2", "_"]))
    sizes = ONES | {AXIS_OF[d]: draw(SIZES) for d in backend.dimensions if d != "e"}
    stage = sizes["dp"] * sizes["tp"] * sizes["cp"]
    if "e" in backend.dimensions:
        sizes["ep"] = draw(divisors(stage))
    if not backend.halves or draw(st.booleans()):
        return Allocation(backend.name, name, sizes)
    tp = draw(divisors(stage // sizes["ep"]))
    experts = ExpertSizes(stage // sizes["ep"] // tp, tp, sizes["ep"])
    return Allocation(backend.name, name, sizes, experts)


@given(allocations())
def test_allocation_survives_formatting_and_parsing(allocation: Allocation) -> None:
    again = parse(str(allocation))
    assert again == allocation
    assert hash(again) == hash(allocation)
    sizes = allocation.sizes
    assert allocation.world_size == math.prod(sizes[axis] for axis in ("dp", "tp", "pp", "cp"))
    if allocation.experts is not None:
        experts = allocation.experts
        assert experts.dp * experts.tp * experts.ep * sizes["pp"] == allocation.world_size


@given(allocations())
def test_every_rank_has_one_place_on_each_grid(allocation: Allocation) -> None:
    plan = ModelPlan(
        role="actor",
        backend=str(allocation),
        engine=allocation.backend,
        sizes={axis: allocation.sizes[axis] for axis in AXIS_ORDER},
        expert_sizes=expert_sizes(allocation),
        ranks=tuple(range(allocation.world_size)),
        trained=True,
        head="lm",
    )
    for grid in filter(None, (topology(plan), expert_topology(plan))):
        assert grid.world_size == allocation.world_size
        places = {tuple(grid.coordinates(rank).items()) for rank in range(grid.world_size)}
        assert len(places) == grid.world_size
        for axis in grid.axes:
            members = sorted(rank for group in grid.blocks((axis,)) for rank in group)
            assert members == list(range(grid.world_size))


@given(st.text("fsdpmegatron:[]0123456789 dtpce+|()", max_size=24))
def test_any_string_parses_or_raises_an_allocation_error(text: str) -> None:
    try:
        allocation = parse(text)
    except AllocationError:
        return
    assert parse(str(allocation)) == allocation
