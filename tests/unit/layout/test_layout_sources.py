"""Sources of layouts and holders of their tensors."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmrl.errors import LayoutError
from slurmrl.tensors.layout import (
    Array,
    Box,
    Layout,
    Shard,
    TensorSpec,
    chunk,
    flat_range,
    relative_storage,
    row_major,
    sources,
    storage_of,
    view,
)

SHAPES = {"a": (7, 3), "b": (5,), "c": (4, 2, 3), "d": (1, 6)}
TENSORS = {name: TensorSpec(shape, "float32") for name, shape in SHAPES.items()}
WHOLE = {
    name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 100 * index
    for index, (name, shape) in enumerate(SHAPES.items())
}


def chunked(ranks: int) -> Layout:
    """Ceil-chunks of dim 0, like FSDP2."""
    boxes = [[(n, chunk(s, ranks, r)) for n, s in SHAPES.items()] for r in range(ranks)]
    return Layout.of(
        TENSORS, tuple(tuple(Shard.contiguous(n, b) for n, b in row if b.count) for row in boxes)
    )


def flat(ranks: int) -> Layout:
    """Equal ranges of one flat buffer of all tensors, like a distributed optimizer."""
    total = sum(int(np.prod(shape)) for shape in SHAPES.values())
    share = -(-total // ranks)
    rows: list[list[Shard]] = [[] for _ in range(ranks)]
    begin = 0
    for name, shape in SHAPES.items():
        count = int(np.prod(shape))
        for rank, row in enumerate(rows):
            first = min(max(rank * share - begin, 0), count)
            last = min(max((rank + 1) * share - begin, 0), count)
            at = begin + first - rank * share
            for box in flat_range(shape, first, last):
                row.append(Shard(name, box, "buffer", at, row_major(box.size)))
                at += box.count
        begin += count
    return Layout.of(TENSORS, rows)


def columns(ranks: int) -> Layout:
    """The last dim in interleaved columns, a storage wider than the shard, and replicas of b."""
    rows: list[list[Shard]] = [[] for _ in range(ranks)]
    for name, shape in SHAPES.items():
        for column in range(shape[-1]):
            box = Box((*(0,) * (len(shape) - 1), column), (*shape[:-1], 1))
            strides = tuple(stride * 2 for stride in row_major(shape))
            shard = Shard(name, box, name, 2 * column + 1, strides)
            targets = range(ranks) if name == "b" else [column % ranks]
            for rank in targets:
                rows[rank].append(shard)
    return Layout.of(TENSORS, rows)


KINDS: dict[str, Callable[[int], Layout]] = {"chunked": chunked, "flat": flat, "columns": columns}
LAYOUTS = st.tuples(st.sampled_from(sorted(KINDS)), st.integers(1, 5)).map(
    lambda case: KINDS[case[0]](case[1])
)


class Memory:
    """Storages of all ranks, made on first use; nan marks elements that were never written."""

    def __init__(self) -> None:
        self.arrays: dict[tuple[int, str], Array] = {}

    def __call__(self, rank: int, storage: str) -> Array:
        return self.arrays.setdefault((rank, storage), np.full(200, np.nan, dtype=np.float32))

    def shard(self, rank: int, shard: Shard) -> Array:
        return view(self(rank, shard.storage), shard.offset, shard.strides, shard.box.size)


def filled(layout: Layout) -> Memory:
    memory = Memory()
    for rank, shard in layout.all_shards():
        memory.shard(rank, shard)[...] = WHOLE[shard.name][shard.box.slices]
    return memory


@given(LAYOUTS, LAYOUTS)
def test_any_layout_can_be_converted_to_any_other(source: Layout, target: Layout) -> None:
    source.check()
    target.check()
    memory = filled(source)
    for _, shard in target.all_shards():
        found = np.full(shard.box.size, np.nan, dtype=np.float32)
        for part, box in sources(source.holders[shard.name], shard.box):
            held = part.shard(shard.name)
            stored = memory(part.ranks[-1], held.storage)
            values = view(stored, held.offset_of(box), held.strides, box.size)
            assert np.isnan(found[box.inside(shard.box)]).all(), "each element is taken once"
            found[box.inside(shard.box)] = values
        assert np.array_equal(found, WHOLE[shard.name][shard.box.slices])


def test_missing_elements_are_named() -> None:
    whole = chunked(2)
    half = Layout.of(TENSORS, [whole.held_by(0)])
    with pytest.raises(LayoutError, match=r"no rank holds Box\(start=\(4, 0\)"):
        sources(half.holders["a"], Box.whole(SHAPES["a"]))
    with pytest.raises(LayoutError, match=r"no rank holds .* of tensor 'a'"):
        half.check()
    with pytest.raises(LayoutError, match="rank 0 holds a shard of unknown tensor 'e'"):
        Layout.of(TENSORS, [[Shard.contiguous("e", Box((0,), (1,)))]])


def test_sequence_piece_outside_its_tensor_is_rejected() -> None:
    shard = Shard.contiguous("b", Box((3,), (3,)))
    with pytest.raises(LayoutError, match="lies outside 'b'"):
        Layout.of({"b": TENSORS["b"]}, ((shard,),)).check()


def test_view_beyond_its_storage_is_rejected() -> None:
    with pytest.raises(LayoutError, match="exceeds a storage of 6"):
        view(np.zeros(6), 1, (3, 1), (2, 3))
    with pytest.raises(LayoutError, match="exceeds"):
        view(np.zeros(6), -1, (1,), (2,))
    assert view(np.arange(6), 0, (3, 1), (2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]


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
