"""Engines with adam, whose decay is a part of the gradient: its steps are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from tests.distributed.engines import cases
from tests.distributed.engines.cases import Setup, batch, model
from tests.distributed.engines.test_engines_contract import plain_decoder
from tests.distributed.engines.test_engines_megatron import BUDGET, EVEN, outputs_of
from tests.pool import RankPool

HERE = "tests.distributed.engines.cases"
STEPS = 3
SETTINGS: dict[str, Any] = {"betas": (0.8, 0.9)}
SHARES = ([0, 1, 2, 3, 4, 6, 7, 8, 9], [5])


def weights_of_one_process(decay: float) -> dict[str, torch.Tensor]:
    decoder = plain_decoder("lm", **EVEN).double()
    groups = [
        {"params": [p], "weight_decay": decay if p.dim() > 1 else 0.0} for p in decoder.parameters()
    ]
    optimizer = torch.optim.Adam(groups, lr=1e-2, eps=1e-3, **SETTINGS)
    for number in range(STEPS):
        sample = batch(number)
        optimizer.zero_grad()
        total, _ = cases.loss(outputs_of(decoder, sample), sample)
        (total / cases.denominator(sample)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: p.detach() for name, p in decoder.named_parameters()}


@pytest.mark.parametrize("engine", ["fsdp", pytest.param("megatron", marks=pytest.mark.long)])
def test_adam_steps_as_one_process_and_resumes_bit_exactly(
    ranks: RankPool, tmp_path: Path, engine: str
) -> None:
    options = {"name": "adam", "weight_decay": 0.1, **SETTINGS}
    settings = model(architecture=EVEN, optimizer=options, **BUDGET)
    setup = Setup(engine=engine, model=settings, split=SHARES)
    straight, first, second = (tmp_path / name for name in ("straight", "first", "second"))
    for folder in (straight, first, second):
        folder.mkdir()
    ranks(2, f"{HERE}:train", setup, range(STEPS), save=straight)
    ranks(2, f"{HERE}:train", setup, range(2), save=first)
    ranks(2, f"{HERE}:train", setup, range(2, STEPS), load=first, save=second)
    for rank in range(2):
        name = f"actor.{rank}.safetensors"
        assert (straight / name).read_bytes() == (second / name).read_bytes()
    checkpoint = RoleCheckpoint(straight, "actor")
    for name, wanted in weights_of_one_process(0.1).items():
        assert (torch.from_numpy(checkpoint.read(name)) - wanted).abs().max() < 2e-5, name
