"""Layouts as shared holders."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmrl.tensors.layout import Box, Layout, Shard, TensorSpec, relative_storage, storage_of

NAMES = st.text("ab./", max_size=6)


@given(NAMES, NAMES)
def test_storage_is_identified_by_its_relative_name(name: str, storage: str) -> None:
    assert storage_of(name, relative_storage(name, storage)) == storage


@pytest.mark.parametrize("moment", ["exp_avg/", "exp_avg_sq/"])
def test_layers_moments_and_replicas_share_layout_entries(moment: str) -> None:
    """A layout is as large as its distinct holders, not as ranks times tensors."""
    names = [prefix + f"layer.{n}" for n in range(3) for prefix in ("", moment)]
    half = [
        [
            Shard.contiguous(name, Box((2 * part,), (2,)), storage_of(name, "flat"), 5)
            for name in names
        ]
        for part in range(2)
    ]
    layout = Layout.of({name: TensorSpec((4,), "float32") for name in names}, half * 3)
    layout.check()
    (holders,) = {*layout.holders.values()}
    assert [part.ranks for part in holders.parts] == [(0, 2, 4), (1, 3, 5)]
    assert layout.ranks == 6
    restored = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert restored.tensors == layout.tensors
    assert len({*restored.holders.values()}) == 1
    assert [*restored.all_shards()] == [*layout.all_shards()]
    for rank in range(6):
        assert [*layout.held_by(rank)] == half[rank % 2]
