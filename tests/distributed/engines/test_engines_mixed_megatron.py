"""Megatron models with virtual stages, experts and context parallelism in one worker give the same
bits as each model alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurmrl.config.schema.roles import Model
from slurmrl.engines import ENGINES
from slurmrl.engines.base import TrainEngine
from slurmrl.tensors.parallel.groups import build
from tests.distributed.engines.cases import batch, model
from tests.distributed.engines.megatron_cases import Placed, placed, share, step
from tests.distributed.engines.test_engines_contract import value_model
from tests.distributed.engines.test_engines_megatron import BUDGET, EVEN, LLAMA, MOE, TIED, grid
from tests.pool import RankPool
from tests.support import megatron_cpu

STEPS = 2


@dataclass(frozen=True)
class Role:
    where: Placed
    model: dict[str, Any]
    head: str = "lm"
    source: Path | None = None


def roles(folder: Path) -> dict[str, Role]:
    """Return the roles. ``folder`` holds the critic, whose values are not all zero."""
    found = {
        "virtual": Role(placed(tp=2, sp=True, pp=2, v=2), model(architecture=TIED, **BUDGET)),
        "experts": Role(
            placed(tp=2, sp=True, dp=2, experts=grid(1, 1, 2, 2)),
            model(architecture=MOE, **BUDGET),
        ),
        "context": Role(placed(pp=2, cp=2), model(architecture=LLAMA, dtype="bfloat16", **BUDGET)),
        "values": Role(
            placed(tp=2, cp=2), model(architecture=None, **BUDGET), head="value", source=folder
        ),
    }
    return {
        name: replace(role, where=replace(role.where, role=name)) for name, role in found.items()
    }


def made(chosen: dict[str, Role]) -> dict[str, TrainEngine]:
    megatron_cpu.install()
    places = [role.where for role in chosen.values()]
    contexts = build(places, rank=dist.get_rank(), device=torch.device("cpu"))
    return {
        name: ENGINES.load("megatron")(
            name,
            Model(**role.model),
            head=role.head,
            trained=True,
            context=contexts[name],
            seed=7,
            total_steps=STEPS,
            source=role.source,
        )
        for name, role in chosen.items()
    }


def trained(chosen: dict[str, Role], folder: Path, *, offload: bool) -> dict[str, Any]:
    """Return the outputs of each model at each step, and the checksum of its checkpoint."""
    engines = made(chosen)
    found: dict[str, Any] = {name: [] for name in engines}
    for engine in engines.values() if offload else ():
        engine.offload()
    for number in range(STEPS):
        for call in ("forward", "train"):
            for name, engine in engines.items():
                engine.onload()
                if call == "forward":
                    outputs = engine.forward(batch(number).take(share(engine)))
                    found[name] += [values.tolist() for _, values in sorted(outputs.items())]
                else:
                    found[name].append(step(engine, number))
                if offload:
                    engine.offload()
    for name, engine in engines.items():
        engine.onload()
        torch.manual_seed(0)  # the random state of the process is in the file, too
        found[name].append(engine.save(folder)[0].checksum)
    return found


@pytest.mark.long
def test_megatron_and_fsdp_models_together_train_as_if_alone(
    ranks: RankPool, tmp_path: Path
) -> None:
    value_model(tmp_path / "model", **EVEN)
    chosen = roles(tmp_path / "model")
    (tmp_path / "together").mkdir()
    here = f"{__name__}:trained"
    together = ranks(4, here, chosen, tmp_path / "together", offload=True, deadline_s=400.0)
    for name, role in chosen.items():
        folder = tmp_path / name
        folder.mkdir()
        alone = ranks(4, here, {name: role}, folder, offload=False, deadline_s=400.0)
        for one, other in zip(together, alone, strict=True):
            assert one[name] == other[name], name
            assert len({str(entry) for entry in one[name]}) == len(one[name])
