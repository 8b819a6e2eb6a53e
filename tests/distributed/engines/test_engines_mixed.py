"""Several models with layouts and engines of their own in one worker, replaying rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slurmrl.checkpoint.pieces import RoleCheckpoint
from slurmrl.models.build import build
from slurmrl.models.config import ModelConfig
from slurmrl.models.decoder import Decoder
from slurmrl.models.init import init_tensor
from tests.distributed.engines.cases import LENGTHS, model
from tests.distributed.engines.mixed_cases import ROLES, STEPS, Role, loss, recorded
from tests.distributed.engines.test_engines_megatron import (
    BUDGET,
    ROUNDING,
    TIED,
    adam,
    close,
    outputs_of,
)
from tests.pool import RankPool


def decoder_of(role: Role, settings: dict[str, Any]) -> Decoder:
    config = ModelConfig.from_hf(settings["architecture"])
    decoder = build(config, role.head)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            value = init_tensor(name, tuple(p.shape), config, role.seed)
            p.copy_(torch.zeros_like(p) if name == "score.weight" else value)
    return decoder


@pytest.mark.long
def test_each_model_computes_as_alone(ranks: RankPool, tmp_path: Path) -> None:
    settings = model(architecture=TIED, **BUDGET)
    for number in range(STEPS):
        (tmp_path / str(number)).mkdir()
    results = ranks(
        4, "tests.distributed.engines.mixed_cases:run", settings, tmp_path, deadline_s=400.0
    )
    for role in ROLES:
        decoder = decoder_of(role, settings)
        optimizer = adam(decoder, settings)
        for number in range(STEPS):
            sample = recorded(number)
            outputs = outputs_of(decoder, sample)
            for rank in results:
                items, theirs, _ = rank[number][role.role]
                for name, whole in outputs.items():
                    parts = whole.detach().split(LENGTHS)
                    wanted = torch.cat([parts[index] for index in items])
                    assert torch.allclose(theirs[name], wanted, atol=5e-5), (role.role, name)
            if not role.trained:
                continue
            optimizer.zero_grad()
            total = loss(outputs, sample)[0] / sum(LENGTHS)
            total.backward()  # type: ignore[no-untyped-call]
            gradients = {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}
            norm = sum(g.double().square().sum().item() for g in gradients.values()) ** 0.5
            for rank in results:
                stats = rank[number][role.role][2]
                assert stats["loss"] == pytest.approx(total.item(), rel=1e-5)
                assert stats["grad_norm"] == pytest.approx(norm, rel=1e-5)
            checkpoint = RoleCheckpoint(tmp_path / str(number), role.role)
            for name, gradient in gradients.items():
                found = torch.from_numpy(checkpoint.read(f"exp_avg/{name}"))
                close(name, found, gradient, norm, share=ROUNDING if number == 0 else 1e-4)
            optimizer.step()
