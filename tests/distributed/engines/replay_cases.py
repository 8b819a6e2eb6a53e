"""Functions that ranks run in the tests of replayed sampling masks and experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slurmrl.algorithms.rollout_calls import add_experts, add_masks
from slurmrl.data.meta import EXPERTS, SampledMasks
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import Outputs
from slurmrl.models.experts import UNKNOWN
from tests.distributed.engines import megatron_cases
from tests.distributed.engines.cases import (
    ARCHITECTURE,
    Setup,
    batch,
    denominator,
    loss,
    make,
)
from tests.distributed.engines.megatron_cases import Case, share
from tests.support import megatron_cpu


def supported() -> SequenceSample:
    """Return a batch with sampling masks: every fourth token and the first of each sequence was
    drawn from all tokens, the others from up to nine tokens.
    """
    sample, masks = batch(), SampledMasks()
    generator = torch.Generator().manual_seed(3)
    vocabulary = int(ARCHITECTURE["vocab_size"])  # type: ignore[call-overload]
    for ids in sample.tensor("input_ids").split(sample.item_lengths("input_ids")):
        for place, token in enumerate(ids.tolist()):
            others = torch.randperm(vocabulary, generator=generator)[: place % 9].tolist()
            masks.add(sorted({token, *others}) if place % 4 else [])
    add_masks(sample, masks)
    return sample


def with_experts(sample: SequenceSample, blocks: int, experts: int) -> SequenceSample:
    """Return the sample with two random experts per block and token, except for the last tokens and
    the fourth sequence.
    """
    generator = torch.Generator().manual_seed(5)
    rows = []
    for number, length in enumerate(sample.item_lengths("input_ids")):
        picks = [torch.randperm(experts, generator=generator)[:2] for _ in range(blocks * length)]
        picks[-blocks:] = [torch.full((2,), UNKNOWN)] * blocks
        row = torch.cat(picks).to(torch.int16).numpy()
        rows.append(row[:0] if number == 3 else row)
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


@dataclass(frozen=True)
class Recorded:
    """Results of an engine with recorded experts."""

    items: list[int]
    """Of this rank."""
    outputs: Outputs
    without: Outputs
    """The outputs without the record."""
    reference: Outputs
    """Those of a frozen model beside it, which has no record, after the outputs with it."""
    stats: dict[str, float]


def recorded(case: Setup | Case, blocks: int, experts: int, folder: Path) -> Recorded:
    """Return outputs of this rank's items, and train one step on them, whose result is saved."""
    of: Any = megatron_cases.make if isinstance(case, Case) else make
    actor, reference = of(case), of(replace(case, trained=False))
    items = share(actor)
    sample = with_experts(batch(), blocks, experts).take(items)
    plain = sample.only(key for key in sample.keys if key != EXPERTS)
    without, outputs = actor.forward(plain), actor.forward(sample)
    beside = reference.forward(plain)
    stats = actor.train_batch(sample, loss, denominator(sample))
    actor.save(folder)
    return Recorded(items, outputs, without, beside, stats)


def marked(recorded: list[list[list[int]]], experts: int) -> list[list[int]]:
    """The mask of real tokens with these experts."""
    megatron_cpu.install()
    from slurmrl.engines.megatron.routers import marks

    found = torch.tensor(recorded, dtype=torch.int16)
    return marks(torch.ones(len(found), dtype=torch.bool), found, experts).int().tolist()
