from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmrl.tensors.parallel.topology import ProcessTopology


def test_coordinate_outside_the_grid_is_rejected_with_the_range() -> None:
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
    with pytest.raises(ValueError, match="differ in number"):
        ProcessTopology(("dp", "dp"), (1, 1))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_process_topology_agrees_with_brute_force_on_any_grid(
    sizes: list[int], data: st.DataObject
) -> None:
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
    groups = topology.blocks((axis,))
    assert peers in groups
    assert sorted(one for group in groups for one in group) == list(range(len(points)))
    chosen = data.draw(st.sets(st.sampled_from(axes)))
    wanted = {a: here[a] for a in chosen}
    assert topology.filter(**wanted) == [
        other
        for other, point in enumerate(points)
        if wanted.items() <= dict(zip(axes, point, strict=True)).items()
    ]


def test_groups_along_several_axes_are_cartesian_products() -> None:
    topology = ProcessTopology(("dp", "cp", "tp"), (2, 2, 2))
    assert topology.blocks(("cp", "tp")) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert topology.blocks(("dp", "cp")) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert topology.blocks(("pp", "tp")) == topology.blocks(("tp",))
    assert topology.blocks(()) == [[rank] for rank in range(8)]
