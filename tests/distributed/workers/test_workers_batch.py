"""Calls with separate layouts receive their inputs, on real ranks."""

from __future__ import annotations

import pytest

from tests.distributed.workers.batch_cases import Where
from tests.pool import RankPool

HERE = "tests.distributed.workers.batch_cases"
LAYOUTS = [
    Where("actor", {"dp": 4}, (0, 1, 2, 3)),
    Where("critic", {"dp": 2, "tp": 2}, (0, 1, 2, 3)),
    Where("ref", {"dp": 1}, (2,)),
    Where("reward", {"dp": 2}, (1, 3)),
    Where("scorer", {"pp": 2, "dp": 2}, (0, 1, 2, 3)),
]
ROLLOUT = ("input_ids", "logprobs")
CALLS = [
    ("generate", 0, ("prompt_ids",), ROLLOUT),
    ("judge", 0, ("input_ids",), ("rewards",)),
    ("ref", 2, ("input_ids",), ("ref_logprobs",)),
    ("values", 1, ("input_ids", "logprobs"), ("values",)),
    ("again", 1, ("input_ids", "values", "rewards"), ()),
    ("stages", 4, ("prompt_ids", "logprobs"), ()),
    ("train", 3, ("input_ids", "rewards", "ref_logprobs", "values"), ()),
]


def test_every_call_receives_its_inputs(ranks: RankPool) -> None:
    """Also covers empty parts, and a batch that is smaller than a layout."""
    events = ranks(4, f"{HERE}:run", LAYOUTS, CALLS, [13, 1, 2, 8], deadline_s=60.0)
    everywhere = ["generate", "judge", "values", "again", "stages"]
    for rank, batches in enumerate(events):
        own = (
            set(everywhere) | ({"ref"} if rank == 2 else set()) | ({"train"} if rank % 2 else set())
        )
        assert [set(names) for names in batches] == [own] * 4


@pytest.mark.parametrize("filtered", [2, 4])
def test_items_accepted_by_a_filter_keep_their_earlier_results(
    ranks: RankPool, filtered: int
) -> None:
    """Calls up to the filter get all candidates of several rounds. Later calls get the chosen items
    with their earlier results, from any rank. Covers empty parts, rounds without a chosen item, and
    steps after such a step.
    """
    steps = [
        ([list(range(9)), list(range(20, 27))], [25, 3, 0, 21, 8, 20, 4]),
        ([[30, 31]], []),
        ([[40], [41, 42, 43, 44], [45, 46]], [45, 40]),
    ]
    arguments = (LAYOUTS, CALLS, filtered, steps)
    parts = ranks(4, f"{HERE}:choose", *arguments, deadline_s=60.0)
    for number, (_, chosen) in enumerate(steps):
        trained = [item for rank in (1, 3) for item in parts[rank][number]]
        assert sorted(trained) == sorted(chosen) or not chosen


def test_sending_rank_does_not_wait(ranks: RankPool) -> None:
    """Ranks 0 and 1 finish a batch although rank 2 has not begun to read their results. Rank 2
    waits for rank 3, which waits for ranks 0 and 1.
    """
    layouts = [
        Where("actor", {"dp": 2}, (0, 1)),
        Where("ref", {"dp": 1}, (3,)),
        Where("critic", {"dp": 1}, (2,)),
    ]
    calls = [
        ("generate", 0, ("prompt_ids",), ROLLOUT),
        ("ref", 1, ("input_ids",), ("ref_logprobs",)),
        ("values", 2, ("input_ids", "ref_logprobs"), ()),
    ]
    events = ranks(4, f"{HERE}:run", layouts, calls, [6, 6, 6], deadline_s=60.0)
    assert events == [[["generate"]] * 3] * 2 + [[["values"]] * 3, [["ref"]] * 3]


def test_other_ranks_read_inputs_while_producer_is_busy(ranks: RankPool) -> None:
    """Ranks 0 and 1 get their inputs although rank 2, which made these, is still in an earlier
    call.
    """
    layouts = [
        Where("actor", {"dp": 1}, (2,)),
        Where("ref", {"dp": 1}, (2,)),
        Where("critic", {"dp": 2}, (0, 1)),
    ]
    calls = [
        ("generate", 0, ("prompt_ids",), ROLLOUT),
        ("busy", 1, ("input_ids", "logprobs"), ("ref_logprobs",)),
        ("meanwhile", 2, ("input_ids", "logprobs"), ("values",)),
        ("train", 2, ("input_ids", "ref_logprobs", "values"), ()),
    ]
    events = ranks(3, f"{HERE}:run", layouts, calls, [6, 1, 6], deadline_s=60.0)
    assert events == [[["meanwhile", "train"]] * 3] * 2 + [[["generate", "busy"]] * 3]


@pytest.mark.parametrize("items", [1, 5])
def test_single_rank_sends_no_data(ranks: RankPool, items: int) -> None:
    layouts = [Where("actor", {"dp": 1}, (0,))]
    calls = [("generate", 0, ("prompt_ids",), ROLLOUT), ("train", 0, ROLLOUT, ())]
    assert ranks(1, f"{HERE}:run", layouts, calls, [items]) == [[["generate", "train"]]]


@pytest.mark.parametrize(("items", "minibatches"), [(24, 3), (24, 1), (3, 1), (1, 1), (5, 4)])
def test_training_is_balanced_by_the_tokens_of_completions(
    ranks: RankPool, items: int, minibatches: int
) -> None:
    """The lengths of completions are unknown before generation.

    Afterwards, every minibatch has the same items as before, and about the same number of tokens
    on each rank. An item may have any number of sequences, and a rank none.
    """
    sizes = [[1 + (item * item * 37) % 200] * (item % 3) + [7] for item in range(items)]
    parts = ranks(4, f"{HERE}:rebalance", sizes, minibatches, deadline_s=60.0)
    assert sorted(item for own, _ in parts for item in own) == list(range(items))
    each = items // minibatches
    for start in range(0, each * minibatches if items % minibatches == 0 else 0, each):
        section = range(start, start + each)
        loads = [sum(sum(sizes[item]) for item in own if item in section) for own, _ in parts]
        assert max(loads) - min(loads) <= max(sum(sizes[item]) for item in section)
