"""The fsdp engine on a real GPU: memory that offloading frees, and weights that stay on
the host.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurmrl.config.schema.roles import Model
from slurmrl.engines.fsdp.engine import FSDPEngine
from slurmrl.tensors.parallel.groups import ParallelContext, build
from tests.distributed.engines.cases import Placed, batch, denominator, loss

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device on this machine"
)

ARCHITECTURE = {
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
SLACK_BYTES = 2**20


@pytest.fixture
def context(tmp_path: Path) -> Iterator[ParallelContext]:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        yield build([Placed("actor", (0,), {"dp": 1})], rank=0, device=device)["actor"]
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Made:
    engine: FSDPEngine
    parameters: int


def make(context: ParallelContext, **settings: Any) -> Made:
    model = Model(architecture=ARCHITECTURE, dtype="bfloat16", **settings)
    engine = FSDPEngine(
        "actor",
        model,
        head="lm",
        trained=True,
        context=context,
        seed=7,
        total_steps=10,
        source=None,
    )
    return Made(engine, sum(spec.bytes // 4 for spec in engine.layout().tensors.values()))


def step(engine: FSDPEngine) -> float:
    sample = batch()
    return engine.train_batch(sample, loss, denominator(sample))["loss"]


def held_bytes() -> int:
    gc.collect()  # engines of earlier tests, whose hooks refer to each other
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_offload_frees_weights_and_moments_and_onload_restores_them(
    context: ParallelContext,
) -> None:
    made, other = make(context), make(context)
    expected = [step(other.engine) for _ in range(3)]
    found = []
    for _ in range(3):
        found.append(step(made.engine))
        before = held_bytes()
        made.engine.offload()
        freed = before - held_bytes()
        assert freed >= 12 * made.parameters - SLACK_BYTES  # float32: weights and two moments
        made.engine.onload()
        assert abs(held_bytes() - before) <= SLACK_BYTES
    assert found == pytest.approx(expected, rel=1e-3)


def test_host_resident_weights_train_like_gpu_weights(context: ParallelContext) -> None:
    step(make(context).engine)  # the libraries' own memory is there from now on
    before = held_bytes()
    on_host = make(context, cpu_offload=True)
    assert abs(held_bytes() - before) <= SLACK_BYTES
    found = [step(on_host.engine) for _ in range(3)]
    assert abs(held_bytes() - before) <= 4 * on_host.parameters
    expected_engine = make(context).engine
    assert found == pytest.approx([step(expected_engine) for _ in range(3)], rel=1e-2)
