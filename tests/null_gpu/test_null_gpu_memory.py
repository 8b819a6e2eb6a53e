"""`slurmrl plan` estimates the GPU memory of a model as the caching allocator counts it."""

from __future__ import annotations

import gc
from itertools import product
from typing import Any

import pytest
import torch

from slurmrl.config.allocation import parse
from slurmrl.config.schema.roles import Model
from slurmrl.plan.estimates.memory import Memory, MemoryDemand, estimate
from slurmrl.plan.estimates.shape import Lengths, read
from tests.null_gpu import cases
from tests.null_gpu.values import SmallValues

RANKS = 8
LENGTH = 4096
TOLERANCE = 0.05
MODES = ("off", "selective", "full")
MODELS = {"1.5B": cases.QWEN_1_5B, "7B": cases.QWEN_7B}
CASES = tuple(product(MODELS, (1, 4), MODES))
"""Model, sequences of a micro-batch, checkpointing."""


def planned(architecture: dict[str, Any], sequences: int, mode: str, micro_batches: int) -> Memory:
    shape = read(architecture)
    assert shape is not None
    model = Model.model_validate(
        {
            "architecture": architecture,
            "dtype": "bfloat16",
            "gradient_checkpointing": mode,
            "max_tokens_per_microbatch": sequences * LENGTH,
        }
    )
    return estimate(
        MemoryDemand(
            model=model,
            shape=shape,
            allocation=parse(f"fsdp:d{RANKS}"),
            head="lm",
            trained=True,
            computes=True,
            generates=False,
            lengths=Lengths(RANKS * sequences * micro_batches, LENGTH, 0, assumed=False),
        )
    )


def measured(architecture: dict[str, Any], sequences: int, mode: str, micro_batches: int) -> int:
    """Return the peak of a second step, when all state exists."""
    gc.collect()  # earlier engines, whose hooks refer to each other
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < 2**28  # workspaces of cuBLAS
    engine = cases.engine(
        architecture, gradient_checkpointing=mode, max_tokens_per_microbatch=sequences * LENGTH
    )
    sample = cases.batch([LENGTH] * sequences * micro_batches)
    engine.train_batch(sample, cases.ppo_loss, 1.0)
    torch.cuda.reset_peak_memory_stats()
    engine.train_batch(sample, cases.ppo_loss, 1.0)
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_peak_memory_of_training_equals_the_planned_estimate(micro_batches: int) -> None:
    """From the second micro-batch on, gradients of the first one exist."""
    off = []
    with cases.first_of(RANKS), SmallValues():
        for size, sequences, mode in CASES:
            peak = measured(MODELS[size], sequences, mode, micro_batches) / 2**30
            estimated = planned(MODELS[size], sequences, mode, micro_batches).together / 2**30
            if estimated != pytest.approx(peak, rel=TOLERANCE):
                off.append((size, sequences, mode, estimated, peak))
    assert not off, "plan and measured GiB differ"
