"""Optimizer steps and inferences on gloo ranks, which `predicted_layouts.py` runs on each rank."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from slurmrl.data.sample import SequenceSample
from slurmrl.tensors.parallel.device import CPU, set_up
from tests.distributed.engines.cases import Setup, denominator, loss, make


def measure(
    model: dict[str, Any], sizes: dict[str, int], sequences: int, length: int, rounds: int
) -> dict[str, tuple[float, float]]:
    """Return the minimum CPU seconds and wall seconds of a rank, by call."""
    set_up(CPU, threads=1, deterministic=True)  # as in workers
    engine = make(Setup(model=model, sizes=sizes, options={}))
    own = sequences // engine.context.dp_size
    generator = torch.Generator().manual_seed(dist.get_rank())
    vocabulary = int(model["architecture"]["vocab_size"])
    tokens = own * length
    sample = SequenceSample.from_default(
        [length] * own,
        [f"item{index}" for index in range(own)],
        {
            "input_ids": torch.randint(vocabulary, (tokens,), generator=generator),
            "advantages": torch.randn(tokens, generator=generator),
        },
    )
    calls = {
        "train": lambda: engine.train_batch(sample, loss, denominator(sample)),
        "infer": lambda: engine.forward(sample),
    }
    found = {}
    for name, call in calls.items():
        call()
        least = [float("inf")] * 2
        for _ in range(rounds):
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            call()
            taken = time.process_time() - used, time.perf_counter() - began
            least = [min(one, other) for one, other in zip(least, taken, strict=True)]
        found[name] = (least[0], least[1])
    return found
