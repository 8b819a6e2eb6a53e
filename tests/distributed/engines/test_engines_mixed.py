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
from slurmrl.models.hf import to_hf
from slurmrl.models.init import init_tensor
from tests.distributed.engines.cases import LENGTHS, model
from tests.distributed.engines.mixed_cases import ROLES, STEPS, Role, loss, recorded
from tests.distributed.engines.test_engines_megatron import (
    BUDGET,
    ROUNDING,
    TIED,
    close,
    outputs_of,
    reference,
)
from tests.pool import RankPool


def decoder_of(role: Role, settings: dict[str, Any]) -> Decoder:
    config = ModelConfig.from_hf(settings["architecture"])
    decoder = build(config, role.head)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            p.copy_(init_tensor(name, tuple(p.shape), config, role.seed))
    return decoder


@pytest.mark.long
def test_each_model_computes_as_alone(ranks: RankPool, tmp_path: Path) -> None:
    settings = model(architecture=TIED, **BUDGET)
    for number in range(STEPS):
        (tmp_path / str(number)).mkdir()
    for role in ROLES:  # all have values, where new heads would give zeros
        (tmp_path / role.role).mkdir()
        to_hf(decoder_of(role, settings), tmp_path / role.role)
    results = ranks(
        4, "tests.distributed.engines.mixed_cases:run", settings, tmp_path, deadline_s=400.0
    )
    for role in ROLES:
        decoder = decoder_of(role, settings)
        optimizer = reference(decoder, settings["optimizer"])
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
