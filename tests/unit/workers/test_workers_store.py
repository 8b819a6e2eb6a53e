"""A rank's batch grows key by key and is replaced as a whole."""

from __future__ import annotations

import pytest
import torch

from slurmrl.data.sample import SequenceSample
from slurmrl.workers.worker.executor import SampleStore


def prompts(*lengths: int) -> SequenceSample:
    ids = [f"{index}@0" for index in range(len(lengths))]
    return SequenceSample.from_default(lengths, ids, {"prompt_ids": torch.arange(sum(lengths))})


def completed(*lengths: int, first_id: str = "0@0") -> SequenceSample:
    ids = [first_id, *(f"{index}@0" for index in range(1, len(lengths)))]
    return SequenceSample.from_default(lengths, ids, {"input_ids": torch.arange(sum(lengths))})


def test_nothing_was_loaded() -> None:
    store = SampleStore()
    assert store.tokens() == 0
    with pytest.raises(RuntimeError, match="no batch was loaded"):
        _ = store.sample


def test_calls_add_keys() -> None:
    store = SampleStore()
    store.replace(prompts(2, 3))
    assert store.tokens() == 0
    assert store.tokens("prompt_ids") == 5
    store.add(completed(4, 6))
    assert store.tokens() == 10
    assert set(store.sample.keys) == {"prompt_ids", "input_ids"}


def test_only_items_of_the_batch_can_be_added() -> None:
    store = SampleStore()
    store.replace(prompts(2, 3))
    with pytest.raises(ValueError, match="same ids"):
        store.add(completed(4, 6, first_id="9@0"))


def test_next_batch_replaces_everything() -> None:
    store = SampleStore()
    store.replace(prompts(2, 3))
    store.add(completed(4, 6))
    store.replace(prompts(1))
    assert store.sample.keys == ("prompt_ids",)
    store.replace(None)
    assert store.tokens("prompt_ids") == 0
