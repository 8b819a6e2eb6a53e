"""Launches and host waits per step and per token are limited. A change that adds one per layer,
micro-batch or token fails here. docs/benchmarks.md has the numbers of whole models.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from slurmrl.data.sample import SequenceSample
from slurmrl.rollouts.generation.base import GenerationOptions
from tests.null_gpu import cases, device
from tests.null_gpu.values import SmallValues
from tests.support.generated import generated

LAYERS = 4
FOUR_LAYERS = {**cases.QWEN_1_5B, "num_hidden_layers": LAYERS}
LENGTH, SEQUENCES = 512, 4
LAUNCHES_OF_A_MICRO_BATCH = 450
LAUNCHES_OF_A_TOKEN = 185
"""Some 15 percent above what was measured."""
WAITS_OF_A_STEP = 4
"""To agree on micro-batches (two), for the sums of statistics, and for the norm of gradients."""
WAITS_OF_A_TOKEN = 1 / 8
FEW, MORE = 9, 25
"""New tokens of two generations; their difference is that of as many decode steps."""


@pytest.fixture(autouse=True)
def _ranks() -> Iterator[None]:
    with cases.first_of(8), SmallValues():
        yield


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_training_step_makes_the_expected_gpu_calls(micro_batches: int) -> None:
    engine = cases.engine(
        FOUR_LAYERS, max_tokens_per_microbatch=LENGTH * SEQUENCES // micro_batches
    )
    sample = cases.batch([LENGTH] * SEQUENCES).to("cuda")
    engine.train_batch(sample, cases.ppo_loss, 1.0)
    with device.counted() as found, device.waits() as sites:
        engine.train_batch(sample, cases.ppo_loss, 1.0)
    launches = found["launches"] + found["products"]
    assert launches <= micro_batches * LAUNCHES_OF_A_MICRO_BATCH
    assert found["waits"] <= WAITS_OF_A_STEP, sites


def test_generated_token_makes_the_expected_gpu_calls() -> None:
    engine = cases.engine(FOUR_LAYERS, trained=False)

    def generate(new_tokens: int) -> None:
        sample = SequenceSample(
            tuple(f"item{index}" for index in range(SEQUENCES)),
            {"prompt_ids": [[LENGTH]] * SEQUENCES},
            data={"prompt_ids": torch.arange(LENGTH * SEQUENCES) % 100},
        )
        options = GenerationOptions(max_new_tokens=new_tokens, stop_token_ids=(151645,))
        generated(engine, sample, options, seed=1, step=1, keys=torch.arange(SEQUENCES))

    generate(FEW)
    with device.counted() as few, device.waits() as sites_of_few:
        generate(FEW)
    with device.counted() as more, device.waits() as sites:
        generate(MORE)
    steps = MORE - FEW
    launches = sum(more[name] - few[name] for name in ("launches", "products")) / steps
    assert launches <= LAUNCHES_OF_A_TOKEN
    assert (more["waits"] - few["waits"]) / steps <= WAITS_OF_A_TOKEN, sites - sites_of_few
