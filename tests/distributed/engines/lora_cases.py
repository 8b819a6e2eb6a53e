"""Functions that ranks run in the tests of adapters: see ``cases``."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.engines.base import Outputs
from tests.distributed.engines.cases import Setup, batch, denominator, loss, make

Chunk = tuple[str, tuple[int, ...], Tensor]


def loaded(setup: Setup, folder: Path) -> tuple[Outputs, Outputs, list[Chunk]]:
    """Return outputs with and without the adapters of a checkpoint, and this rank's chunks of the
    merged weights: name, start of the box, values.
    """
    engine = make(setup)
    engine.load(folder)
    sample = batch(1).take(setup.split[engine.context.dp_rank])
    adapted = engine.forward(sample)
    with engine.base():
        base = engine.forward(sample)
    merged = engine.storages()
    shards = engine.layout().held_by(dist.get_rank())
    return adapted, base, [(s.name, s.box.start, merged[s.storage].clone()) for s in shards]


def stored(setup: Setup) -> tuple[dict[str, torch.dtype], bool, float]:
    """Return the dtype of each parameter, whether a training step left the frozen parameters
    unchanged, and the step's loss.
    """
    engine = make(setup)
    local = engine._shards.local()  # type: ignore[attr-defined]
    trained = engine._shards.trained()  # type: ignore[attr-defined]
    before = {name: chunk.clone() for name, chunk in local.items()}
    sample = batch().take(setup.split[engine.context.dp_rank])
    stats = engine.train_batch(sample, loss, denominator(sample))
    frozen = all(torch.equal(before[name], local[name]) for name in local if name not in trained)
    return {name: chunk.dtype for name, chunk in local.items()}, frozen, stats["loss"]


def offloaded(setup: Setup) -> tuple[int, list[float], list[float]]:
    """Return the bytes of all parameters during offloading, and the losses of steps with and
    without offloading between them.
    """
    engine, kept = make(setup), make(setup)
    sample = batch().take(setup.split[engine.context.dp_rank])
    losses: tuple[list[float], list[float]] = ([], [])
    during = 0
    for _ in range(3):
        for number, each in enumerate((engine, kept)):
            losses[number].append(each.train_batch(sample, loss, denominator(sample))["loss"])
        engine.offload()
        local = engine._shards.local().values()  # type: ignore[attr-defined]
        during = sum(tensor.untyped_storage().nbytes() for tensor in local)
        engine.onload()
    return during, *losses
