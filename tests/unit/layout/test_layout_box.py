"""Boxes against plain index arithmetic."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurmrl.tensors.layout import Box, blocks, chunk, cover, flat_range

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


def mark(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    """Count the boxes that hold each element."""
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        counts[box.slices] += 1
    return counts


@st.composite
def box_pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = draw(SHAPES)

    def one() -> Box:
        start = tuple(draw(st.integers(0, n - 1)) for n in shape)
        size = tuple(draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True))
        return Box(start, size)

    return shape, one(), one()


@given(box_pairs())
def test_box_intersection_and_difference_are_exact(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, first, second = case
    both = mark(shape, [first]) * mark(shape, [second])
    common = first.intersect(second)
    assert np.array_equal(both, mark(shape, [common] if common else []))
    assert first.contains(second) == (common == second)
    if common is not None:
        rest = first.without(common)
        assert np.array_equal(mark(shape, [common, *rest]), mark(shape, [first]))
        assert all(box.count for box in rest)


@given(SHAPES.filter(bool), st.integers(1, 7))
def test_chunks_equal_torch_chunks(shape: tuple[int, ...], parts: int) -> None:
    tensor = torch.arange(int(np.prod(shape))).view(shape)
    expected = list(tensor.chunk(parts))
    expected += [tensor[:0]] * (parts - len(expected))
    for index in range(parts):
        box = chunk(shape, parts, index)
        assert torch.equal(tensor[box.slices], expected[index])
        assert box.size == tuple(expected[index].shape)


@given(SHAPES, st.data())
def test_flat_range_equals_its_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = int(np.prod(shape))
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count))
    flat = np.arange(count).reshape(shape)
    boxes = list(flat_range(shape, first, last))
    found = [value for box in boxes for value in flat[box.slices].reshape(-1).tolist()]
    assert found == list(range(first, last))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = tuple(draw(st.integers(0, length - 1)) for length in shape)
    spans = zip(shape, start, strict=True)
    return Box(start, tuple(draw(st.integers(0, length - first)) for length, first in spans))


@given(SHAPES, st.data())
def test_each_element_is_taken_once_from_the_first_part_that_has_it(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    box, *parts = (data.draw(boxes_of(shape)) for _ in range(data.draw(st.integers(1, 6))))
    taken, missing = cover(box, parts)
    found = np.array(mark(shape, missing) * (len(parts) + 1))
    for number, common in taken:
        found[common.slices] += number + 1
    expected = np.zeros(shape, dtype=int)
    expected[box.slices] = len(parts) + 1
    for number, part in reversed([*enumerate(parts)]):
        common = box.intersect(part) if box.count else None
        if common is not None:
            expected[common.slices] = number + 1
    assert np.array_equal(found, expected)


@given(SHAPES, st.integers(1, 40), st.data())
def test_blocks_cover_the_box_in_order_and_are_small(
    shape: tuple[int, ...], most: int, data: st.DataObject
) -> None:
    box = data.draw(boxes_of(shape))
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    cut = list(blocks(box, most))
    assert [n for block in cut for n in numbers[block.slices].flat] == [*numbers[box.slices].flat]
    assert all(block.count <= most for block in cut)
    assert len(cut) <= max(1, 2 * -(-box.count // most)) * max(1, len(shape))
    within = numbers[box.slices]
    assert all(np.array_equal(within[b.inside(box)], numbers[b.slices]) for b in cut)


def test_scalar_box_has_one_element() -> None:
    box = Box.whole(())
    assert box.count == 1
    assert box.intersect(box) == box
    assert box.without(box) == []
