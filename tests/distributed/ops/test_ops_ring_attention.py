"""Ring attention on several ranks, against the whole matrix of scores in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.distributed.ops.ring_cases import Case, exact
from tests.pool import RankPool

HERE = "tests.distributed.ops.ring_cases"
MIXED = (1, 2, 3, 3, 5, 8, 8, 8, 21, 40, 40, 77)


def assert_as_whole(
    ranks: RankPool, n: int, case: Case, near: float = 2e-6, function: str = "attend"
) -> list[list[int]]:
    """Compare the result and all gradients; return the rows that each rank sent."""
    found = ranks(n, f"{HERE}:{function}", case)
    for index, expected in enumerate(exact(case)):
        ours = torch.stack([values[index].double() for values, _ in found]).sum(0)
        assert (ours - expected).abs().max() <= near * max(1.0, expected.abs().max().item())
    return [sent for _, sent in found]


@pytest.mark.parametrize("window", [None, 1, 6, 30, 1000])
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (3, 3)])
def test_ring_attention_equals_attention_with_all_scores(
    ranks: RankPool, n: int, heads: int, kv_heads: int, window: int | None
) -> None:
    case = Case(MIXED, heads=heads, kv_heads=kv_heads, window=window)
    assert_as_whole(ranks, n, case)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("function", ["attend", "attend_with_flash", "attend_checkpointed"])
def test_attention_sinks_count_once(ranks: RankPool, function: str, window: int | None) -> None:
    assert_as_whole(ranks, 3, Case(MIXED, window=window, sinks=True), function=function)


@pytest.mark.parametrize("lengths", [(600,), (1, 700), (300, 301), (1,), (1, 1, 1), (5, 0, 9)])
def test_ring_attention_handles_few_sequences_and_tokens(
    ranks: RankPool, lengths: tuple[int, ...]
) -> None:
    """More queries than a block has, empty chunks and ranks without tokens."""
    assert_as_whole(ranks, 4, Case(lengths))
    assert_as_whole(ranks, 4, Case(lengths, window=290))


@pytest.mark.parametrize("window", [None, 1, 30, 90])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_ring_attention_with_flash_calls_equals_all_scores(
    ranks: RankPool, kv_heads: int, window: int | None
) -> None:
    """Plain kernels replace the GPU kernels and take the same arguments."""
    case = Case(MIXED, kv_heads=kv_heads, window=window)
    assert_as_whole(ranks, 4, case, function="attend_with_flash")


def test_selective_checkpointing_keeps_results(ranks: RankPool) -> None:
    """The backward pass sends no keys again."""
    case = Case((640,))
    whole = assert_as_whole(ranks, 4, case)
    assert assert_as_whole(ranks, 4, case, function="attend_checkpointed") == whole


def test_empty_input_gives_empty_output(ranks: RankPool) -> None:
    for found, sent in ranks(2, f"{HERE}:attend", Case(())):
        assert all(x.shape[0] == 0 for x in found)
        assert sent == []


def test_bfloat16_results_are_close(ranks: RankPool) -> None:
    assert_as_whole(ranks, 4, Case((9, 200), dtype=torch.bfloat16), near=2e-2)


def test_large_scores_are_merged_without_overflow(ranks: RankPool) -> None:
    assert_as_whole(ranks, 4, Case((33, 120), scale=40.0), near=1e-4)


def test_ranks_send_only_keys_needed_by_other_ranks(ranks: RankPool) -> None:
    """Sequences within a chunk need no keys of other ranks.

    Longer ones with a window need the window's keys.
    """
    within = assert_as_whole(ranks, 4, Case((8,) * 16))
    assert within == [[]] * 4
    whole = Case((640,))
    every = sum(map(sum, assert_as_whole(ranks, 4, whole)))
    # Rank r needs 6 - r of the other ranks' chunks of 80 keys. Both passes send keys, and the
    # backward pass returns their gradients.
    assert every == 3 * 80 * (6 + 5 + 4 + 3)
    near = sum(map(sum, assert_as_whole(ranks, 4, replace(whole, window=11))))
    # Ten keys cross each of seven boundaries; the middle one lies within the last rank.
    assert near == 3 * 10 * 6
