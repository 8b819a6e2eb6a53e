"""Packing against brute force and proven bounds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from slurmrl.data.order import balanced_partition, even_partition, even_sizes, row_microbatches
from slurmrl.tensors.bins import best_fit


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_balanced_parts_hold_every_index_once(lengths: list[int], k: int) -> None:
    parts = balanced_partition(lengths, k)
    assert len(parts) == k
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    assert len(lengths) < k or all(parts)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_balanced_parts_satisfy_grahams_bound(lengths: list[int], k: int) -> None:
    largest = max(sum(lengths[i] for i in part) for part in balanced_partition(lengths, k))
    every = product(range(k), repeat=len(lengths))
    optimum = min(
        max(
            sum(x for x, own in zip(lengths, choice, strict=True) if own == part)
            for part in range(k)
        )
        for choice in every
    )
    assert largest <= (4 / 3 - 1 / (3 * k)) * optimum + 1e-9


@settings(deadline=None)
@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 9), st.integers(1, 5))
def test_each_section_is_balanced(lengths: list[int], k: int, sections: int) -> None:
    """Each optimizer step waits for the rank with the most tokens of its minibatch."""
    parts = balanced_partition(lengths, k, sections)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    for start, stop in pairwise(accumulate(even_sizes(len(lengths), sections), initial=0)):
        shares = [[lengths[i] for i in part if start <= i < stop] for part in parts]
        sums = [sum(share) for share in shares]
        longest = max(lengths[start:stop], default=0)
        assert max(sums) - min(sums) <= longest
        assert stop - start < k or all(shares)


def test_sections_of_few_items_go_to_the_least_loaded_parts() -> None:
    parts = balanced_partition([5, 9, 9, 5], 2, sections=4)
    assert sorted(sum([5, 9, 9, 5][i] for i in part) for part in parts) == [14, 14]


@settings(deadline=None)
@given(st.lists(st.integers(0, 100), max_size=60), st.integers(1, 120))
def test_bins_respect_the_budget(lengths: list[int], budget: int) -> None:
    parts = best_fit(lengths, budget)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    for part in parts:
        assert part == sorted(part)
        assert sum(lengths[i] for i in part) <= budget or len(part) == 1
    half_empty = [part for part in parts if 2 * sum(lengths[i] for i in part) <= budget]
    assert len(half_empty) <= 1
    assert parts == sorted(parts)


def row_tokens(lengths: list[list[int]], part: Iterable[int], *, packed: bool = False) -> int:
    rows = [length for index in part for length in lengths[index]]
    width = max(rows, default=0)
    return (len(best_fit(rows, width)) if packed else len(rows)) * width


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 100), min_size=1, max_size=4), max_size=40),
    st.integers(1, 500),
    st.booleans(),
)
def test_rows_of_microbatches_respect_the_budget(
    lengths: list[list[int]], budget: int, packed: bool
) -> None:
    parts = row_microbatches(lengths, budget, packed=packed)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    for part in parts:
        assert part == sorted(part)
        assert row_tokens(lengths, part, packed=packed) <= budget or len(part) == 1
    assert parts == sorted(parts)


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(20, 50))
def test_padded_microbatches_of_single_sequences_are_minimal_in_number(
    singles: list[int], budget: int
) -> None:
    lengths, n = [[length] for length in singles], len(singles)
    possible = []
    for choice in product(range(n), repeat=n):
        parts = [[i for i in range(n) if choice[i] == part] for part in set(choice)]
        if all(row_tokens(lengths, part) <= budget for part in parts):
            possible.append(len(parts))
    assert len(row_microbatches(lengths, budget, packed=False)) == min(possible)


def test_short_sequences_are_not_padded_to_a_long_sequence() -> None:
    lengths = [[8000], *[[100]] * 80]
    assert row_microbatches(lengths, 16384, packed=False) == [[0, 1], list(range(2, 81))]
    assert row_microbatches(lengths, 16384, packed=True) == [list(range(81))]


def test_equal_items_keep_order_and_count_all_their_sequences() -> None:
    assert row_microbatches([[3]] * 5, 6, packed=False) == [[0, 1], [2, 3], [4]]
    assert row_microbatches([[1], [4, 1], [2, 2], [4]], 8, packed=False) == [[0, 2], [1], [3]]


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(1, 9))
def test_even_sizes_differ_by_at_most_one(n: int, k: int) -> None:
    sizes = even_sizes(n, k)
    assert sum(sizes) == n
    assert len(sizes) == k
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.lists(st.integers(0, 100), max_size=60), st.integers(1, 9), st.integers(1, 7))
def test_even_parts_have_equal_numbers_of_every_section(
    lengths: list[int], k: int, sections: int
) -> None:
    parts = even_partition(lengths, k, sections)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    cuts = list(accumulate(even_sizes(len(lengths), sections), initial=0))
    for start, stop in [(0, len(lengths)), *pairwise(cuts)]:
        numbers = [sum(start <= index < stop for index in part) for part in parts]
        assert max(numbers) - min(numbers) <= 1


def test_even_parts_balance_lengths_if_possible() -> None:
    """With balance by tokens only, the part with the longest item would have 2 of 32 items."""
    lengths = [1800] + [60] * 31
    assert sorted(map(len, balanced_partition(lengths, 2))) == [2, 30]
    parts = even_partition(lengths, 2)
    assert [len(part) for part in parts] == [16, 16]
    sums = [sum(lengths[index] for index in part) for part in parts]
    assert max(sums) - min(sums) == 1800 - 60
    lengths = [9, 1, 1, 9, 5, 2, 2, 5]
    sums = [sum(lengths[index] for index in part) for part in even_partition(lengths, 2, 2)]
    assert sums == [17, 17]
