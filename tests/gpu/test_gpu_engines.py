"""Whole engines on a real GPU against one plain process on the CPU: steps, outputs, generation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurmrl.config.schema.roles import Model
from slurmrl.engines import ENGINES
from slurmrl.plan.estimates.server_types import FP8_CAPABILITY
from slurmrl.rollouts.generation.base import GenerationOptions
from slurmrl.tensors.parallel.groups import ParallelContext, build
from tests.distributed.engines.cases import (
    ARCHITECTURE,
    Placed,
    batch,
    denominator,
    loss,
    model,
    prompts,
)
from tests.distributed.engines.megatron_cases import placed
from tests.distributed.engines.test_engines_contract import plain_decoder
from tests.distributed.engines.test_engines_families import MOE
from tests.distributed.engines.test_engines_families import plain_decoder as with_experts
from tests.distributed.engines.test_engines_megatron import outputs_of
from tests.support.decoder_folders import to_hf
from tests.support.generated import generate, generated

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch sees no CUDA device on this machine"
    ),
    pytest.mark.filterwarnings("ignore"),  # megatron-core warns of its own settings
]

DEVICE, BACKEND = "cuda:0", "nccl"
ADAM = {"betas": (0.9, 0.95), "eps": 1e-3}
STEPS = 3


@pytest.fixture(params=["fsdp", "megatron", "megatron with TransformerEngine"])
def settings(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Return an engine with the settings of its model that differ from the default."""
    engine, _, more = request.param.partition(" with ")
    if engine == "megatron":
        pytest.importorskip("megatron.core")
    if more:
        pytest.importorskip("transformer_engine.pytorch")
    return engine, {} if engine == "fsdp" else {"transformer_engine": bool(more)}


@pytest.fixture
def context(tmp_path: Path, settings: tuple[str, Any]) -> Iterator[ParallelContext]:
    device = torch.device(DEVICE)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(BACKEND, store=store, rank=0, world_size=1)
    where: Any = Placed("actor", (0,), {"dp": 1}) if settings[0] == "fsdp" else placed()
    try:
        yield build([where], rank=0, device=device)["actor"]
    finally:
        dist.destroy_process_group()


def make(name: str, context: ParallelContext, source: Path, **changes: Any) -> Any:
    return ENGINES.load(name)(
        "actor",
        Model(**model(architecture=None, optimizer=ADAM, **changes)),
        head="lm",
        trained=True,
        context=context,
        seed=7,
        total_steps=10,
        source=source,
    )


@pytest.mark.parametrize("settings", ["fsdp", "megatron"], indirect=True)
def test_steps_and_outputs_equal_a_cpu(
    context: ParallelContext, settings: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    decoder = plain_decoder("lm")
    to_hf(decoder, tmp_path)
    engine = make(settings[0], context, tmp_path, **settings[1])
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2, weight_decay=0.0, **ADAM)
    for number in range(STEPS):
        sample = batch(number)
        outputs = outputs_of(decoder, sample)
        found = engine.forward(sample)
        for name, wanted in outputs.items():
            assert torch.allclose(found[name].cpu(), wanted.detach(), atol=1e-4), (number, name)
        optimizer.zero_grad()
        total, _ = loss(outputs, sample)
        (total / denominator(sample)).backward()
        stats = engine.train_batch(sample, loss, denominator(sample))
        assert stats["loss"] == pytest.approx(total.item() / denominator(sample), rel=1e-4)
        optimizer.step()


@pytest.mark.parametrize("mode", ["off", "selective", "full"])
@pytest.mark.parametrize("experts", [False, True])
def test_bfloat16_trains_near_float32(
    context: ParallelContext,
    settings: tuple[str, dict[str, Any]],
    mode: str,
    experts: bool,
    tmp_path: Path,
) -> None:
    to_hf(with_experts(MOE) if experts else plain_decoder("lm"), tmp_path)
    exact, rounded = (
        make(
            settings[0], context, tmp_path, dtype=dtype, gradient_checkpointing=mode, **settings[1]
        )
        for dtype in ("float32", "bfloat16")
    )
    for number in range(STEPS):
        sample = batch(number)
        one, other = (e.train_batch(sample, loss, denominator(sample)) for e in (exact, rounded))
        assert other["loss"] == pytest.approx(one["loss"], rel=5e-2)


@pytest.mark.parametrize("settings", ["megatron with TransformerEngine"], indirect=True)
@pytest.mark.parametrize("fp8", ["hybrid", "e4m3"])
def test_fp8_trains_near_bfloat16(
    context: ParallelContext, settings: tuple[str, dict[str, Any]], fp8: str, tmp_path: Path
) -> None:
    """Two engines with the same weights give the same losses: no scale comes from earlier steps."""
    if torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("this GPU has no FP8 products")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    to_hf(with_experts({**ARCHITECTURE, **sizes}), tmp_path)
    first, again, exact = (
        make(settings[0], context, tmp_path, dtype="bfloat16", fp8=each)
        for each in (fp8, fp8, None)
    )
    for number in range(STEPS):
        sample = batch(number)
        one, other, usual = (
            engine.train_batch(sample, loss, denominator(sample))
            for engine in (first, again, exact)
        )
        assert one == other
        assert one["loss"] == pytest.approx(usual["loss"], rel=0.1)
        assert one["loss"] != usual["loss"]


@pytest.mark.parametrize("settings", ["fsdp"], indirect=True)
def test_completions_equal_a_cpu(
    context: ParallelContext, settings: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    decoder = plain_decoder("lm")
    to_hf(decoder, tmp_path)
    engine = make(settings[0], context, tmp_path)
    sample = batch()
    options, keys = GenerationOptions(max_new_tokens=6, greedy=True), torch.arange(sample.bs)
    wanted = generate(
        decoder,
        sample.tensor("input_ids"),
        sample.cu_seqlens("input_ids"),
        options,
        seed=3,
        step=0,
        keys=keys,
    )
    found = generated(engine, prompts(sample), options, seed=3, step=0, keys=keys)
    assert torch.equal(found.lengths.cpu(), wanted.lengths)
    assert torch.equal(found.tokens.cpu(), wanted.tokens)
    assert torch.allclose(found.logprobs.cpu(), wanted.logprobs, atol=1e-4)
