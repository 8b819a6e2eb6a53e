"""Functions that ranks run in the tests of the megatron engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.config.schema.roles import Model
from slurmrl.engines import ENGINES
from slurmrl.engines.base import TrainEngine
from slurmrl.errors import UsageError
from slurmrl.plan.dataflow import Method
from slurmrl.tensors.layout import Layout
from slurmrl.tensors.parallel.groups import build
from slurmrl.workers.worker.executor import UpdateKept
from tests.distributed.engines.cases import batch, denominator, loss
from tests.support import megatron_cpu, transformer_engine_cpu

ORDER = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class Placed:
    """A layout on the first ranks of the job."""

    sizes: dict[str, int]
    expert_sizes: dict[str, int] = field(default_factory=dict)
    virtual_pipeline: int = 1
    sequence_parallel: bool = False
    role: str = "actor"
    engine: str = "megatron"

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(prod(self.sizes.values())))


def placed(
    *, sp: bool = False, v: int = 1, experts: dict[str, int] | None = None, **sizes: int
) -> Placed:
    """Axes by their names, in the order of a plan."""
    return Placed({axis: sizes.get(axis, 1) for axis in ORDER}, experts or {}, v, sp)


@dataclass(frozen=True)
class Case:
    """A megatron engine."""

    where: Placed
    model: dict[str, Any]
    head: str = "lm"
    trained: bool = True
    source: Path | None = None


def make(case: Case) -> TrainEngine:
    on_cpu = transformer_engine_cpu if case.model.get("transformer_engine") else megatron_cpu
    on_cpu.install()
    contexts = build([case.where], rank=dist.get_rank(), device=torch.device("cpu"))
    engine: TrainEngine = ENGINES.load("megatron")(
        "actor",
        Model(**case.model),
        head=case.head,
        trained=case.trained,
        context=contexts["actor"],
        seed=7,
        total_steps=10,
        source=case.source,
    )
    return engine


def share(engine: TrainEngine) -> list[int]:
    """Return the item indices of this rank. Shares are unequal: the last data-parallel rank has
    most.
    """
    rank, size = engine.context.dp_rank, engine.context.dp_size
    return [index for index in range(10) if min(index // 2, size - 1) == rank]


def step(engine: TrainEngine, number: int) -> dict[str, float]:
    sample = batch(number).take(share(engine))
    return engine.train_batch(sample, loss, denominator(sample))


def train(
    case: Case, steps: range = range(1), save: Path | None = None, load: Path | None = None
) -> list[dict[str, float]]:
    """Train, and save each step under its number. Return the statistics of each step."""
    engine = make(case)
    torch.manual_seed(dist.get_rank() if load is None else 99)
    if load is not None:
        engine.load(load)
        assert engine.steps == steps.start
    stats = []
    for number in steps:
        torch.rand(3)  # other code uses the process's random generator
        stats.append(step(engine, number))
        if save is not None:
            engine.save(save / str(number))
    return stats


def outputs(case: Case) -> tuple[dict[str, Tensor], list[int]]:
    """Outputs of this rank's items, and the items' indices."""
    engine = make(case)
    return engine.forward(batch().take(share(engine))), share(engine)


def held(case: Case) -> tuple[Layout, dict[str, Tensor]]:
    """The layout, and the contents of this rank's storages."""
    engine: Any = make(case)
    return engine.layout(), {
        name: flat.clone() for name, (flat, _) in engine._state.weights().items()
    }


def offloaded(case: Case) -> tuple[int, int, list[dict[str, float]], list[dict[str, float]]]:
    """Return the bytes of weights, moments and gradients before and during offloading, and the
    statistics of steps with and without offloading.
    """
    engine: Any = make(case)
    kept = make(case)
    first = [step(engine, 0)]
    before = held_bytes(engine)
    engine.offload()
    engine.offload()
    during = held_bytes(engine)
    engine.onload()
    first.append(step(engine, 1))
    return before, during, first, [step(kept, 0), step(kept, 1)]


def kept(case: Case) -> tuple[bool, float]:
    """Return whether the compared weights are float32, and the share of a step's update that
    remains in bfloat16.
    """
    engine, measure = make(case), UpdateKept("bfloat16")
    trains: Any = SimpleNamespace(method=Method.TRAIN_STEP, role="actor")
    before = measure.before(trains, engine)
    assert before is not None
    step(engine, 0)
    wide = not torch.equal(values := torch.from_numpy(before), values.bfloat16().float())
    return wide, measure.stats(before, engine)["update_kept"][0]


def held_bytes(engine: Any) -> int:
    """Bytes of weights and, for a trained model, of moments and gradients."""
    tensors = [*engine._state.tensors(), *engine._state.gradients()]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def resaved(case: Case, source: Path, target: Path) -> None:
    engine = make(case)
    engine.load(source)
    engine.save(target)


def frozen(case: Case, folder: Path) -> tuple[list[Any], str]:
    """The files that a frozen engine saves, and its error about training."""
    engine = make(case)
    engine.load(folder)
    try:
        step(engine, 0)
    except UsageError as error:
        return engine.save(folder), str(error)
    return [], "trained"
