"""The order of a dataset, and the record of what was consumed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmrl.data.order import Cursor, DataOrder, merge_ranges, permutation


def test_an_order_is_a_function_of_seed_epoch_and_size() -> None:
    assert permutation(1, 0, 8) == permutation(1, 0, 8)
    assert sorted(permutation(1, 0, 100)) == list(range(100))
    others = [permutation(2, 0, 100), permutation(1, 1, 100)]
    assert all(other != permutation(1, 0, 100) for other in others)
    assert permutation(1, 0, 6) == [1, 0, 5, 4, 3, 2]


@settings(deadline=None)
@given(st.integers(1, 20), st.lists(st.integers(1, 30), max_size=8))
def test_every_epoch_is_read_exactly_once(size: int, takes: list[int]) -> None:
    order = DataOrder(size, seed=3)
    cursor, seen, ranges = Cursor(), [], []
    for n in takes:
        items, end = order.take(cursor, n)
        assert len(items) == n
        ranges += order.ranges(cursor, end)
        seen += items
        cursor = end
    counts = Counter(seen)
    assert all(count == 1 for count in counts.values())
    full = [epoch for epoch in range(cursor.epoch) for _ in range(size)]
    assert [epoch for epoch, _ in seen] == full + [cursor.epoch] * cursor.position
    whole = [[epoch, 0, size] for epoch in range(cursor.epoch)]
    rest = [[cursor.epoch, 0, cursor.position]] if cursor.position else []
    assert merge_ranges(ranges) == whole + rest


def test_a_restored_cursor_continues_alike() -> None:
    order = DataOrder(7, seed=1)
    _, middle = order.take(Cursor(), 10)
    rest, _ = order.take(middle, 9)
    again, _ = DataOrder(7, seed=1).take(Cursor.from_json(middle.to_json()), 9)
    assert again == rest


def test_without_shuffling_the_file_order_stays() -> None:
    items, _ = DataOrder(3, seed=1, shuffle=False).take(Cursor(0, 1), 4)
    assert items == [(0, 1), (0, 2), (1, 0), (1, 1)]


def test_an_item_consumed_twice_is_found() -> None:
    assert merge_ranges([[0, 4, 6], [0, 0, 4], [1, 0, 2]]) == [[0, 0, 6], [1, 0, 2]]
    with pytest.raises(ValueError, match="consumed twice"):
        merge_ranges([[0, 0, 4], [0, 3, 6]])


def test_an_empty_dataset_has_no_order() -> None:
    with pytest.raises(ValueError, match="without items"):
        DataOrder(0, seed=1)
