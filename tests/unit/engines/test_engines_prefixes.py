from __future__ import annotations

from itertools import pairwise

import torch

from slurmrl.data.sample import SequenceSample
from slurmrl.engines.microbatch import (
    MOST,
    SHORTEST,
    SharedPrefix,
    shared_microbatches,
    shared_prefixes,
    shared_tokens,
)

A, B, SYSTEM = list(range(100, 130)), list(range(200, 240)), list(range(300, 300 + SHORTEST))


def sample(*items: list[list[int]]) -> SequenceSample:
    """Items of sequences of tokens."""
    lengths = [[len(sequence) for sequence in item] for item in items]
    ids = torch.tensor([token for item in items for sequence in item for token in sequence])
    names = tuple(f"item{index}" for index in range(len(items)))
    return SequenceSample(names, {"input_ids": lengths}, {}, {"input_ids": ids.long()})


def test_completions_share_only_the_prefix_common_to_all() -> None:
    rows = sample(
        [[*A, 1, 2, 3]], [[*A, 1, 2]], [[*A, 5, 2]], [[7] * 40], [[*B, 1]], [[*B, 1, 1]], [[*A, 9]]
    )
    assert shared_prefixes(rows) == [SharedPrefix(0, 3, 30), SharedPrefix(4, 2, 40)]


def test_common_system_prefix_does_not_hide_prompt_prefixes() -> None:
    first, second = [*SYSTEM, *A], [*SYSTEM, *B]
    rows = sample([[*first, 1]], [[*first, 2]], [[*second, 1]], [[*second, 2]], [[*second, 3]])
    assert shared_prefixes(rows) == [
        SharedPrefix(0, 2, SHORTEST + 30),
        SharedPrefix(2, 3, SHORTEST + 40),
    ]
    others = sample(*[[[*SYSTEM, number, *A]] for number in range(4)])
    assert shared_prefixes(others) == [SharedPrefix(0, 4, SHORTEST)]


def test_short_prefixes_are_not_shared() -> None:
    rows = [[*SYSTEM[1:], number] for number in range(3)]
    assert shared_prefixes(sample(rows)) == []
    assert shared_tokens(sample(rows)) is None
    assert shared_tokens(sample()) is None
    assert shared_tokens(sample([A])) is None


def test_each_sequence_has_at_least_one_token_after_its_prefix() -> None:
    rows = sample([A, A], [[*A, 1], [*A, 1, 2]])
    (prefix,) = shared_prefixes(rows)
    assert prefix == SharedPrefix(0, 4, 29)
    assert_maps(rows)


def test_prefix_of_too_many_sequences_is_processed_twice() -> None:
    rows = sample(*[[[*A, number]] for number in range(MOST + 2)])
    assert [prefix.count for prefix in shared_prefixes(rows)] in ([MOST, 2], [2, MOST])


def assert_maps(rows: SequenceSample) -> None:
    """Check that every token of the sample is in a piece and follows the same tokens."""
    shared = shared_tokens(rows)
    assert shared is not None
    ids = rows.tensor("input_ids")
    taken = ids[shared.taken]
    assert torch.equal(taken[shared.places], ids)
    pieces, starts = shared.pieces, shared.pieces.cu_seqlens.tolist()
    cuts = rows.cu_seqlens("input_ids").tolist()
    for start, stop in pairwise(cuts):
        last = int(shared.places[stop - 1])
        piece = int(torch.searchsorted(pieces.cu_seqlens, last, right=True)) - 1
        read = taken[starts[piece] : last + 1]
        prefix = int(pieces.prefixes[piece])
        if prefix >= 0:
            before = taken[starts[prefix] : starts[prefix + 1]]
            assert before[-1] == read[0]
            read = torch.cat([before[:-1], read])
        assert torch.equal(read, ids[start:stop])


def test_segments_contain_each_prefix_token_once() -> None:
    rows = sample([[5, 6]], [[*A, 1, 2, 3], [*A, 1]], [[4] * 20], [[*B, 1]], [[*B, 2, 2]], [[1]])
    shared = shared_tokens(rows)
    assert shared is not None
    assert_maps(rows)
    assert shared.pieces.prefixes.tolist() == [-1, -1, 1, 1, -1, -1, 5, 5, -1]
    rests = 4
    assert len(shared.taken) == len(rows.tensor("input_ids")) - 30 - 40 + rests


def test_micro_batches_count_a_prefix_once_and_keep_its_items_together() -> None:
    """The groups have 30 + 3 * 2 or 40 + 2 distinct tokens."""
    rows = sample(
        *[[[*A, number, 1]] for number in range(3)], [[9] * 10], [[*B, 1]], [[*B, 2]], [[8] * 26]
    )
    assert shared_microbatches(rows, 46) == [[0, 1, 2, 3], [4, 5], [6]]
    assert shared_microbatches(rows, 36) == [[0, 1, 2], [3, 6], [4], [5]]
    assert shared_microbatches(rows, 34) == [[0, 1], [2], [3], [4], [5], [6]]
    assert shared_microbatches(rows, 1000) == [[0, 1, 2, 3, 4, 5, 6]]
    assert shared_microbatches(sample(), 8) == []


def test_prefixes_are_shared_within_and_between_items() -> None:
    pairs = sample([[*A, 1], [*A, 2]], [[*A, 3], [*A, 4]], [[*B, 1], [*B, 2]])
    assert shared_microbatches(pairs, 34) == [[0, 1], [2]]
    assert shared_microbatches(pairs, 33) == [[0], [1], [2]]
