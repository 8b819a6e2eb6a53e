"""Tests of the stored values of single tokens of the first completions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.policy.actor import ActorInterface
from slurmrl.algorithms.rollout_calls import StoredInterface
from slurmrl.algorithms.sequences import kept, pieces, token_notes, token_texts
from slurmrl.config.schema import Logging
from slurmrl.data.sample import SequenceSample
from tests.support.sample_groups import small_group
from tests.unit.algorithms.conftest import MakeWorld


class Bytes:
    """A tokenizer whose tokens are bytes. A sequence loses its leading space."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace").removeprefix(" ")


@pytest.mark.parametrize("text", ["plain", "é and €", " a b", "𝄞"])
def test_token_texts_join_to_the_whole_text(text: str) -> None:
    ids = list(text.encode())
    found = pieces(ids, Bytes())
    assert len(found) == len(ids)
    assert "".join(found) == Bytes().decode(ids)


def test_token_text_is_empty_until_its_character_is_complete() -> None:
    assert pieces(list("€x".encode()), Bytes()) == ["", "", "€", "x"]
    assert pieces(list("a€".encode())[:-1], Bytes()) == ["a", "", "\ufffd"]


def test_kept_samples_are_whole_groups() -> None:
    kept_of = {
        samples: [
            (one.item, one.place, one.sequence) for one in kept([3, 2, 3], Logging(samples=samples))
        ]
        for samples in (0, 1, 3, 4, 9)
    }
    groups = [[(0, 0, 0), (0, 1, 1), (0, 2, 2)], [(1, 0, 3), (1, 1, 4)]]
    assert kept_of[0] == []
    assert kept_of[1] == kept_of[3] == groups[0]
    assert kept_of[4] == groups[0] + groups[1]
    assert len(kept_of[9]) == 8


def two_items() -> SequenceSample:
    """Return two items. The first has two completions, one of them with two turns."""
    lengths = [[6, 3], [3]]
    return SequenceSample.grouped(
        lengths,
        ("a@0", "b@0"),
        {
            "input_ids": torch.tensor(list(b"pABrCD" + b"pEF" + b"pGH")),
            "prompt_mask": torch.tensor([1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0]).bool(),
        },
    )


def test_token_values_begin_at_the_completion_and_are_bounded() -> None:
    sample, kept = two_items(), Logging(samples=2, sample_tokens=4)
    values = {"advantages": torch.arange(12) / 3}
    first, second = token_notes(sample, values, torch.tensor([True, False, True]), kept)
    assert first == {
        "id": "a@0",
        "index": 0,
        "values": {"masked": [0, 0, 1, 0], "advantages": [0.3333, 0.6667, 1.0, 1.333]},
    }
    assert (second["index"], second["values"]["masked"]) == (1, [1, 1])
    assert token_texts(sample, kept, Bytes()) == [
        {"tokens": ["A", "B", "r", "C"], "left_out": 1},
        {"tokens": ["E", "F"], "left_out": 0},
    ]


@pytest.mark.parametrize("kept", [Logging(samples=0), Logging(sample_tokens=0)])
def test_token_notes_of_samples_are_off_by_default(kept: Logging) -> None:
    sample = two_items()
    assert token_notes(sample, {"v": torch.zeros(12)}, torch.ones(3).bool(), kept) == []
    assert token_texts(sample, kept, Bytes()) == []


def test_training_notes_record_trained_tokens(make_world: MakeWorld) -> None:
    world = make_world()
    sample = world.rollout(step=1, prompts=6)
    written = ~sample.tensor("prompt_mask")
    context = world.context(1, sample.ids, kl_coef=0.0)
    config = context.settings.config.model_copy(update={"logging": Logging(samples=6)})
    context = replace(context, settings=replace(context.settings, config=config))
    notes = ActorInterface().train_step(world.actor, sample, context).notes
    assert [note["id"] for note in notes] == list(sample.ids)
    told = {
        name: torch.tensor([value for note in notes for value in note["values"][name]])
        for name in ("masked", "advantages", "logprobs")
    }
    assert not told["masked"].any()
    torch.testing.assert_close(
        told["logprobs"], sample.tensor("logprobs")[written], rtol=1e-3, atol=1e-5
    )
    assert float(told["advantages"].mean()) == pytest.approx(0.0, abs=1e-3), "whitened"
    assert float(told["advantages"].std()) == pytest.approx(1.0, abs=0.1)


def test_rollout_tasks_record_the_weight_version_of_each_token(make_world: MakeWorld) -> None:
    context: CallContext = make_world().context(1, ("7@0",))
    sample = SequenceSample.from_default([1], ["7@0"], {"prompt_ids": torch.tensor([1])})
    given = replace(context, stored=lambda name: small_group(7))
    assert StoredInterface().generate(None, sample, given).notes == [
        {"id": "7@0", "index": 0, "versions": {"names": ["4.1", "5.1"], "drawn_by": [0, 1]}},
        {"id": "7@0", "index": 1, "versions": {"names": ["4.1", "5.1"], "drawn_by": [1]}},
    ]
