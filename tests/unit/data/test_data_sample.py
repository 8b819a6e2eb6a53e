"""SequenceSample: gather, slice, take and update."""

from __future__ import annotations

from itertools import accumulate, pairwise
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmrl.data.meta import SampleMeta
from slurmrl.data.sample import SequenceSample


def make(lengths: list[int], prefix: str = "s") -> SequenceSample:
    total = sum(lengths)
    return SequenceSample.from_default(
        lengths,
        [f"{prefix}{index}" for index in range(len(lengths))],
        {
            "input_ids": torch.arange(total),
            "logprobs": torch.linspace(-1, 0, total),
        },
        {"text": [f"{prefix} {index}" for index in range(len(lengths))]},
        per_sequence={"rewards": torch.arange(len(lengths)).float()},
    )


def nested(groups: list[list[int]], prefix: str = "n") -> SequenceSample:
    """Return items of several sequences each (pairs of answers)."""
    total = sum(map(sum, groups))
    return SequenceSample(
        tuple(f"{prefix}{index}" for index in range(len(groups))),
        {"seq": groups, "score": [[len(inner)] for inner in groups]},
        {},
        {"seq": torch.arange(total), "score": torch.arange(sum(map(len, groups)))},
    )


def same(a: SequenceSample, b: SequenceSample) -> bool:
    return (
        a.ids == b.ids
        and a.lengths == b.lengths
        and a.metadata == b.metadata
        and a.data.keys() == b.data.keys()
        and all(torch.equal(a.tensor(key), b.tensor(key)) for key in a.data)
    )


batches = st.lists(st.integers(1, 9), min_size=1, max_size=20)
groups = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=12)


@settings(deadline=None)
@given(groups, st.data())
def test_gather_reassembles_slices_of_items_with_many_sequences(
    rows: list[list[int]], data: st.DataObject
) -> None:
    sample = nested(rows)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(rows)))) | {0, len(rows)})
    parts = [sample.slice(start, stop) for start, stop in pairwise(cuts)]
    assert [part.bs for part in parts] == [stop - start for start, stop in pairwise(cuts)]
    assert same(SequenceSample.gather(parts), sample)


@settings(deadline=None)
@given(batches, st.randoms())
def test_items_are_taken_in_the_requested_order(lengths: list[int], random: Random) -> None:
    sample = make(lengths)
    order = list(range(len(lengths)))
    random.shuffle(order)
    picked = sample.take(order)
    assert picked.ids == tuple(f"s{index}" for index in order)
    starts = [0, *accumulate(lengths)]
    wanted = [token for i in order for token in range(starts[i], starts[i] + lengths[i])]
    assert picked.tensor("input_ids").tolist() == wanted
    assert picked.tensor("rewards").tolist() == [float(index) for index in order]
    assert picked.metadata["text"] == [f"s {index}" for index in order]


def test_gather_joins_items_in_order_with_the_requested_keys() -> None:
    a, b = make([2, 3]), make([1], "t")
    both = SequenceSample.gather([a, b], keys=["input_ids"])
    assert both.ids == ("s0", "s1", "t0")
    assert both.keys == ("input_ids",)
    assert both.tensor("input_ids").tolist() == [0, 1, 2, 3, 4, 0]
    assert both.metadata["text"] == ["s 0", "s 1", "t 0"]


def test_gathering_no_samples_or_duplicate_items_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples to gather"):
        SequenceSample.gather([])
    with pytest.raises(ValueError, match="duplicate sample ids"):
        SequenceSample.gather([make([1]), make([2])])


def test_an_empty_selection_keeps_keys_and_types() -> None:
    none = make([2, 3]).take([])
    assert none.bs == 0
    assert none.tensor("input_ids").dtype == torch.int64
    assert none.cu_seqlens("input_ids").tolist() == [0]
    assert same(SequenceSample.gather([make([2, 3]), none]), make([2, 3]))


def test_cumulative_lengths_count_every_sequence() -> None:
    assert nested([[2, 3], [1]]).cu_seqlens("seq").tolist() == [0, 2, 5, 6]
    assert make([2, 3]).cu_seqlens("input_ids").dtype == torch.int32


def test_key_is_per_token_or_per_sequence_as_declared() -> None:
    sample = make([2, 3])
    assert sample.lengths["logprobs"] == [[2], [3]]
    assert sample.lengths["rewards"] == [[1], [1]]
    group = SequenceSample.grouped(
        [[2, 1], [3]], ["a", "b"], {"mine": torch.zeros(6)}, per_sequence={"own": torch.zeros(3)}
    )
    assert group.lengths == {"mine": [[2, 1], [3]], "own": [[1, 1], [1]]}


@settings(deadline=None)
@given(groups)
def test_sequences_are_separated_in_order_and_none_is_lost(rows: list[list[int]]) -> None:
    """Each sequence becomes an item with its own tokens and the metadata of its item."""
    sample = nested(rows).only(["seq"])
    sample.metadata["row"] = [f"row {item}" for item in range(len(rows))]
    apart = sample.sequences()
    places = [(item, place) for item, row in enumerate(rows) for place in range(len(row))]
    assert apart.lengths["seq"] == [[rows[item][place]] for item, place in places]
    assert torch.equal(apart.tensor("seq"), sample.tensor("seq"))
    assert apart.metadata["row"] == [f"row {item}" for item, _ in places]
    if any(len(row) > 1 for row in rows):
        assert apart.ids == tuple(f"n{item}#{place}" for item, place in places)
    else:
        assert same(apart, sample)


def test_keys_whose_sequences_differ_cannot_be_separated() -> None:
    sample = nested([[2, 3], [1]])
    with pytest.raises(ValueError, match="key 'score' does not have the same sequences"):
        sample.sequences()


def test_inconsistent_samples_are_rejected() -> None:
    with pytest.raises(ValueError, match="add up to 5"):
        SequenceSample.from_default([2, 3], ["a", "b"], {"input_ids": torch.zeros(4)})
    with pytest.raises(ValueError, match="duplicate sample ids: \\['a'\\]"):
        SequenceSample.from_default([1, 1], ["a", "a"], {"input_ids": torch.zeros(2)})
    with pytest.raises(ValueError, match="1 items, not 2"):
        SampleMeta(("a", "b"), {"x": [[1]]})
    with pytest.raises(KeyError):
        SequenceSample(("a",), {"x": [[1]]}, {}, {"y": torch.zeros(1)})


def test_key_may_hold_no_data() -> None:
    sample = SequenceSample(("a", "b"), {"x": [[1], [2]]}, {}, {"x": None})
    parts = [sample.slice(0, 1), sample.take([1])]
    assert [part.data["x"] for part in parts] == [None, None]
    assert SequenceSample.gather(parts).data["x"] is None
    with pytest.raises(ValueError, match="holds no data"):
        sample.tensor("x")


def test_update_replaces_and_adds_keys_of_the_same_items() -> None:
    sample = make([2, 3])
    more = SequenceSample.from_default(
        [2, 3],
        sample.ids,
        {"values": torch.ones(5)},
        per_sequence={"rewards": torch.tensor([7.0, 8.0])},
    )
    sample.update_(more)
    assert sample.tensor("values").tolist() == [1.0] * 5
    assert sample.tensor("rewards").tolist() == [7.0, 8.0]
    assert sample.tensor("input_ids").tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="first difference"):
        sample.update_(make([2, 3], "t"))
