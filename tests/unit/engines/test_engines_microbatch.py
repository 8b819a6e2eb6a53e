from __future__ import annotations

import pytest
import torch

from slurmrl.data.sample import SequenceSample
from slurmrl.engines.microbatch import agree
from slurmrl.errors import UsageError
from slurmrl.tensors.parallel.groups import ParallelContext
from slurmrl.tensors.parallel.topology import ProcessTopology

TOPOLOGY = ProcessTopology(("dp",), (1,))
ALONE = ParallelContext("actor", torch.device("cpu"), 0, (0,), TOPOLOGY, {})
ITEMS = [[8, 1], [3], [3, 3, 3], [20], [1], [2], [4]]


def sample() -> SequenceSample:
    ids = torch.zeros(sum(map(sum, ITEMS)), dtype=torch.int64)
    names = tuple(f"item{index}" for index in range(len(ITEMS)))
    return SequenceSample(names, {"input_ids": ITEMS}, {}, {"input_ids": ids})


def test_micro_batches_respect_the_token_budget() -> None:
    rounds = agree(sample(), 16, 1.0, ALONE)
    assert rounds.parts == ((0, 1, 6), (2, 4, 5), (3,))


def test_padded_micro_batches_respect_the_token_budget() -> None:
    rounds = agree(sample(), 16, 1.0, ALONE, rows="single")
    assert rounds.parts == ((0,), (1, 6), (2, 4, 5), (3,))
    assert rounds.count == 4


def test_batch_without_unmasked_tokens_trains_nothing() -> None:
    agree(sample(), 16, 1.0, ALONE).check("actor")
    with pytest.raises(UsageError, match="actor: no token of this batch counts"):
        agree(sample(), 16, 0.0, ALONE).check("actor")
