"""What ranks do in the tests of replayed supports."""

from __future__ import annotations

import torch
from torch import Tensor

from slurmrl.algorithms.rollout.recorded import add_experts, add_support
from slurmrl.data.sample import SequenceSample
from slurmrl.data.support import SampledSupport
from tests.distributed.engines.cases import ARCHITECTURE, Setup, batch, denominator, loss, make


def supported() -> SequenceSample:
    """A batch in which every fourth token, and the first of each sequence, was drawn from all
    tokens, and the others from up to nine."""
    sample, support = batch(), SampledSupport()
    generator = torch.Generator().manual_seed(3)
    vocabulary = int(ARCHITECTURE["vocab_size"])  # type: ignore[call-overload]
    for ids in sample.tensor("input_ids").split(sample.item_lengths("input_ids")):
        for place, token in enumerate(ids.tolist()):
            others = torch.randperm(vocabulary, generator=generator)[: place % 9].tolist()
            support.add(sorted({token, *others}) if place % 4 else [])
    add_support(sample, support)
    return sample


def with_experts(sample: SequenceSample, blocks: int, experts: int) -> SequenceSample:
    """The same with arbitrary two of the ``experts`` of each block for every token."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for length in sample.item_lengths("input_ids"):
        picks = [torch.randperm(experts, generator=generator)[:2] for _ in range(blocks * length)]
        rows.append(torch.cat(picks).to(torch.int16).numpy())
    add_experts(sample, rows)
    return sample


def replayed(
    setup: Setup, blocks: int = 0, experts: int = 0
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Outputs of a batch, and the statistics of a step with it."""
    engine, sample = make(setup), supported()
    if blocks:
        sample = with_experts(sample, blocks, experts)
    outputs = engine.forward(sample, temperature=0.7)
    stats = engine.train_batch(sample, loss, denominator(sample), temperature=0.7)
    return outputs, stats
