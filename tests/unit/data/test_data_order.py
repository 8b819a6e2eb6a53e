"""The order of a dataset."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmrl.data.order import DataOrder, permutation


def test_an_order_is_a_function_of_seed_epoch_and_size() -> None:
    assert permutation(1, 0, 8) == permutation(1, 0, 8)
    assert sorted(permutation(1, 0, 100)) == list(range(100))
    others = [permutation(2, 0, 100), permutation(1, 1, 100)]
    assert all(other != permutation(1, 0, 100) for other in others)
    assert permutation(1, 0, 6) == [1, 0, 5, 4, 3, 2]


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(0, 100))
def test_every_epoch_has_each_item_once(size: int, count: int) -> None:
    items = DataOrder(size, seed=3).items(range(count))
    assert [epoch for epoch, _ in items] == [number // size for number in range(count)]
    counts = Counter(items)
    assert all(found == 1 for found in counts.values())
    whole = [item for item in items if item[0] < count // size]
    assert sorted(whole) == [(epoch, i) for epoch in range(count // size) for i in range(size)]


def test_an_item_does_not_depend_on_what_was_read_before() -> None:
    """In whichever order: some are taken again after later ones."""
    numbers = [30, 2, 14, 3, 15, 29, 0]
    found = DataOrder(7, seed=1).items(numbers)
    assert found == [DataOrder(7, seed=1).items([number])[0] for number in numbers]


def test_without_shuffling_the_file_order_stays() -> None:
    items = DataOrder(3, seed=1, shuffle=False).items(range(1, 5))
    assert items == [(0, 1), (0, 2), (1, 0), (1, 1)]


def test_an_empty_dataset_has_no_order() -> None:
    with pytest.raises(ValueError, match="without items"):
        DataOrder(0, seed=1)
