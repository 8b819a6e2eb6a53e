"""The order of a dataset."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmrl.data.order import DataOrder, Mixture, longest_first, permutation


def test_order_depends_only_on_seed_epoch_and_size() -> None:
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


def test_item_does_not_depend_on_earlier_reads() -> None:
    """This holds for any order of reads, even if items are read again after later items."""
    numbers = [30, 2, 14, 3, 15, 29, 0]
    found = DataOrder(7, seed=1).items(numbers)
    assert found == [DataOrder(7, seed=1).items([number])[0] for number in numbers]


def test_order_without_shuffling_is_the_file_order() -> None:
    items = DataOrder(3, seed=1, shuffle=False).items(range(1, 5))
    assert items == [(0, 1), (0, 2), (1, 0), (1, 1)]


def test_order_of_an_empty_dataset_is_an_error() -> None:
    with pytest.raises(ValueError, match="without items"):
        DataOrder(0, seed=1)


WEIGHTS = [5.0, 3.0, 0.5]


def mixture(seed: int = 1) -> Mixture:
    return Mixture([DataOrder(size, f"{seed} {size}") for size in (7, 5, 40)], WEIGHTS, seed)


def source_of(index: int) -> int:
    return (index >= 7) + (index >= 12)


def test_mixture_takes_items_of_each_source_once_and_in_order() -> None:
    items = mixture(1).items(range(600))
    for source, (first, size) in enumerate(((0, 7), (7, 5), (12, 40))):
        own = [(e, i - first) for e, i in items if source_of(i) == source]
        assert own == DataOrder(size, f"1 {size}").items(range(len(own)))
    assert items != mixture(2).items(range(600))


def test_every_interval_of_a_mixture_is_close_to_the_weights() -> None:
    """Also covers intervals far from the start, without reading earlier items."""
    for begin in (0, 12_345, 10**12):
        counts = Counter(source_of(i) for _, i in mixture().items(range(begin, begin + 850)))
        for source, weight in enumerate(WEIGHTS):
            assert abs(counts[source] - 850 * weight / sum(WEIGHTS)) < 5


@settings(deadline=None)
@given(st.lists(st.integers(0, 999), unique=True, max_size=9))
def test_mixture_item_depends_only_on_its_number(numbers: list[int]) -> None:
    found = mixture().items(numbers)
    assert found == [mixture().items([number])[0] for number in numbers]


def test_batches_are_balanced_and_come_longest_first() -> None:
    lengths = [float(permutation(3, 0, 50)[place] ** 2) for place in range(50)]
    order = longest_first(permutation(1, 0, 50), lengths, 10, 0)
    totals = [sum(lengths[i] for i in order[at : at + 10]) for at in range(0, 50, 10)]
    assert sorted(order) == list(range(50))
    assert totals == sorted(totals, reverse=True)
    assert totals[0] < 1.05 * totals[-1], "a shuffled epoch's batches differ by half"
    plain = permutation(1, 0, 50)
    assert max(sum(lengths[i] for i in plain[at : at + 10]) for at in range(0, 50, 10)) > totals[0]


@pytest.mark.parametrize(("size", "batch"), [(10, 4), (7, 10), (9, 3), (11, 1), (5, 7)])
def test_batches_across_an_epoch_boundary_stay_whole(size: int, batch: int) -> None:
    """Its first items complete the batch before it. Only whole batches are sorted."""
    lengths = [float(i) for i in range(size)]
    begun = 0
    for _epoch in range(5):
        first = -begun % batch
        order = longest_first(list(range(size)), lengths, batch, first)
        assert sorted(order) == list(range(size))
        starts = range(min(first, size), size - batch + 1, batch)
        totals = [sum(lengths[i] for i in order[at : at + batch]) for at in starts]
        assert totals == sorted(totals, reverse=True)
        begun += size
