from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmrl.tensors.parallel.topology import ProcessTopology

GRIDS = [sizes for length in (1, 2, 3, 4) for sizes in itertools.product((1, 2, 3), repeat=length)]
AXES = ("pp", "dp", "cp", "tp")


@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_against_brute_force(sizes: tuple[int, ...]) -> None:
    axes = AXES[: len(sizes)]
    topology = ProcessTopology(axes, sizes)
    points = list(itertools.product(*(range(size) for size in sizes)))
    assert topology.world_size == len(points) == math.prod(sizes)
    for rank, point in enumerate(points):
        here = dict(zip(axes, point, strict=True))
        assert topology.coordinates(rank) == here
        assert topology.rank(**here) == rank
        for index, axis in enumerate(axes):
            assert topology.coordinate(rank, axis) == point[index]
            peers = [
                other
                for other, there in enumerate(points)
                if there[:index] + there[index + 1 :] == point[:index] + point[index + 1 :]
            ]
            assert topology.peers(rank, axis) == peers


@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_groups_and_filters_against_brute_force(sizes: tuple[int, ...]) -> None:
    axes = AXES[: len(sizes)]
    topology = ProcessTopology(axes, sizes)
    ranks = list(range(topology.world_size))
    for axis in axes:
        groups = topology.groups(axis)
        assert sorted(rank for group in groups for rank in group) == ranks
        assert all(topology.peers(rank, axis) == group for group in groups for rank in group)
    for choice in itertools.product(*([None, 0, size - 1] for size in sizes)):
        wanted = {a: c for a, c in zip(axes, choice, strict=True) if c is not None}
        assert topology.filter(**wanted) == [
            rank for rank in ranks if wanted.items() <= topology.coordinates(rank).items()
        ]


def test_what_is_outside_is_refused_with_the_range() -> None:
    topology = ProcessTopology(("dp", "tp"), (2, 3))
    with pytest.raises(ValueError, match="rank 6 is outside 0 … 5"):
        topology.coordinates(6)
    with pytest.raises(ValueError, match="rank -1 is outside"):
        topology.coordinates(-1)
    with pytest.raises(ValueError, match="tp=3 is outside 0 … 2"):
        topology.rank(dp=0, tp=3)
    with pytest.raises(ValueError, match="expected coordinates"):
        topology.rank(dp=0)
    with pytest.raises(ValueError, match="unknown axis 'pp'; known: dp, tp"):
        topology.size("pp")
    with pytest.raises(ValueError, match="unknown axis"):
        topology.filter(pp=0)
    with pytest.raises(ValueError, match="at least 1"):
        ProcessTopology(("dp",), (0,))
    with pytest.raises(ValueError, match="do not pair up"):
        ProcessTopology(("dp", "dp"), (1, 1))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_any_grid_against_brute_force(sizes: list[int], data: st.DataObject) -> None:
    axes = [f"a{index}" for index in range(len(sizes))]
    topology = ProcessTopology(axes, sizes)
    points = list(itertools.product(*(range(size) for size in sizes)))
    rank = data.draw(st.integers(0, len(points) - 1))
    here = dict(zip(axes, points[rank], strict=True))
    assert (topology.coordinates(rank), topology.rank(**here)) == (here, rank)
    axis = data.draw(st.sampled_from(axes))
    others = [a for a in axes if a != axis]
    peers = [
        other
        for other, point in enumerate(points)
        if all(dict(zip(axes, point, strict=True))[a] == here[a] for a in others)
    ]
    assert topology.peers(rank, axis) == peers
    assert peers in topology.groups(axis)
    chosen = data.draw(st.sets(st.sampled_from(axes)))
    wanted = {a: here[a] for a in chosen}
    assert topology.filter(**wanted) == [
        other
        for other, point in enumerate(points)
        if wanted.items() <= dict(zip(axes, point, strict=True)).items()
    ]


def test_groups_along_several_axes_are_products() -> None:
    topology = ProcessTopology(("dp", "cp", "tp"), (2, 2, 2))
    assert topology.blocks(("cp", "tp")) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert topology.blocks(("dp", "cp")) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert topology.blocks(("pp", "tp")) == topology.groups("tp")
    assert topology.blocks(()) == [[rank] for rank in range(8)]
