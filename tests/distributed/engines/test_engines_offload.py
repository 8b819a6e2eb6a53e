"""Tests of offloaded engines."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurmrl.engines.base import TrainEngine
from slurmrl.errors import UsageError
from slurmrl.rollouts.generation.base import GenerationOptions
from tests.distributed.engines import cases, megatron_cases
from tests.distributed.engines.cases import Setup, batch, denominator, loss, model, prompts
from tests.distributed.engines.megatron_cases import Case, placed
from tests.distributed.engines.test_engines_megatron import BUDGET, EVEN, MOE, grid
from tests.pool import RankPool
from tests.support.generated import generated

FSDP = {
    "d2": Setup(model=model(architecture=EVEN), split=[[0, 1], [2, 3]]),
    "t2": Setup(model=model(architecture=EVEN), split=[[0, 1]], sizes={"tp": 2}),
}
MEGATRON = {
    "t2 sp": Case(placed(tp=2, sp=True), model(architecture=EVEN, **BUDGET)),
    "p2": Case(placed(pp=2), model(architecture=EVEN, **BUDGET)),
    "d2 e2": Case(placed(dp=2, experts=grid(1, 1, 2, 1)), model(architecture=MOE, **BUDGET)),
}
LAYOUTS = [
    *(pytest.param(case, id=f"fsdp {name}") for name, case in FSDP.items()),
    *(
        pytest.param(case, id=f"megatron {name}", marks=pytest.mark.long)
        for name, case in MEGATRON.items()
    ),
]


def changed(case: Setup | Case, *, trained: bool, **settings: Any) -> dict[str, Any]:
    return {**vars(case), "trained": trained, "model": {**case.model, **settings}}


def made(case: Setup | Case) -> TrainEngine:
    return megatron_cases.make(case) if isinstance(case, Case) else cases.make(case)


def held_bytes(engine: Any) -> int:
    if hasattr(engine, "_chunks"):
        return megatron_cases.held_bytes(engine)
    tensors = (engine._state() if engine.trained else engine._shards.local()).values()
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def away_and_back(case: Setup | Case) -> tuple[int, int, bool]:
    """Return the bytes of this rank's weights before and during offloading, and whether outputs are
    equal afterwards.
    """
    engine = made(case)
    first = engine.forward(batch())
    before = held_bytes(engine)
    engine.offload()
    during = held_bytes(engine)
    engine.onload()
    second = engine.forward(batch())
    return before, during, all(torch.equal(first[name], second[name]) for name in first)


def refusals(case: Setup | Case, folder: Path) -> tuple[dict[str, str], float]:
    """Return the error of each call while the engine is offloaded, and a loss after that."""
    engine = made(case)
    sample = batch()
    engine.save(folder)
    calls = {
        "train_batch": lambda: engine.train_batch(sample, loss, denominator(sample)),
        "forward": lambda: engine.forward(sample),
        "snapshot": lambda: engine.snapshot(),
        "save": lambda: engine.save(folder),
        "load": lambda: engine.load(folder),
    }
    if isinstance(case, Setup):
        keys, options = torch.arange(sample.bs), GenerationOptions(max_new_tokens=2)
        calls["generate"] = lambda: generated(
            engine, prompts(batch()), options, seed=0, step=0, keys=keys
        )
    said = {}
    engine.offload()
    for name, call in calls.items():
        dist.barrier()  # another rank may load the files of a rank
        try:
            call()
        except UsageError as error:
            said[name] = str(error)
        else:
            said[name] = "done"
    engine.onload()
    return said, engine.train_batch(sample, loss, denominator(sample))["loss"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", LAYOUTS)
def test_offloaded_frozen_model_frees_its_memory(
    ranks: RankPool, case: Setup | Case, dtype: str
) -> None:
    frozen = type(case)(**changed(case, trained=False, dtype=dtype))
    for before, during, same in ranks(2, f"{__name__}:away_and_back", frozen, deadline_s=300.0):
        assert before > 0
        assert during == 0
        assert same


@pytest.mark.parametrize("case", LAYOUTS)
def test_offloaded_model_rejects_computation_and_saving(
    ranks: RankPool, tmp_path: Path, case: Setup | Case
) -> None:
    for said, found in ranks(2, f"{__name__}:refusals", case, tmp_path, deadline_s=300.0):
        assert {"train_batch", "forward", "snapshot", "save", "load"} <= set(said)
        message = "actor is offloaded: its weights are in host memory until onload()"
        assert set(said.values()) == {message}
        assert isfinite(found)


def test_cpu_offloaded_model_computes_after_offload(ranks: RankPool, tmp_path: Path) -> None:
    setup = Setup(**changed(FSDP["d2"], trained=True, cpu_offload=True))
    for said, _ in ranks(2, f"{__name__}:refusals", setup, tmp_path):
        assert set(said.values()) == {"done"}
