"""Functions that ranks run in the tests of weight versions: see ``cases``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slurmrl.engines.base import TrainEngine
from slurmrl.engines.host import OwnedTensors
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.shapes import storage_of
from slurmrl.tensors.checkpoint.tensors import Storage, by_name
from slurmrl.tensors.layout import Layout
from slurmrl.tensors.transfer.plan import PlacedLayout
from slurmrl.tensors.weights.writer import PartWriter
from tests.distributed.engines import cases, megatron_cases
from tests.distributed.engines.cases import Setup, batch, denominator, loss
from tests.distributed.engines.megatron_cases import Case

Taken = dict[str, tuple[str, tuple[int, ...], bytes]]
"""The type, shape and bits of each tensor."""


def of_fsdp(setup: Setup, dtype: str, folder: Path) -> list[Taken]:
    """The tensors of this rank: see `_taken`."""

    def step(engine: TrainEngine, number: int) -> None:
        sample = batch(number).take(setup.split[engine.context.dp_rank])
        engine.train_batch(sample, loss, denominator(sample))

    return _taken(cases.make(setup), dtype, folder, step)


def of_megatron(case: Case, dtype: str, folder: Path) -> list[Taken]:
    return _taken(megatron_cases.make(case), dtype, folder, megatron_cases.step)


def of_adapters(setup: Setup, versions: Path) -> Taken:
    """Write this rank's part of version 1.1 of adapters after a step.

    Returns the tensors that this rank gets in a move of the merged weights.
    """
    engine = cases.make(setup)
    sample = batch().take(setup.split[engine.context.dp_rank])
    engine.train_batch(sample, loss, denominator(sample))
    group = dist.new_group(range(dist.get_world_size()))
    assert engine.frozen is not None
    trained = _parts(engine.trained_layout(), by_name, "float32", group)
    with PartWriter(versions / "1.1", dist.get_rank(), frozen=engine.frozen) as writer:
        for entry in trained.take(engine.trained_storages()):
            bits = entry.data().reshape(-1).view(np.uint8)
            writer.add(entry.name, entry.spec.dtype, entry.spec.shape, bits)
        writer.finish()
    assert isinstance(engine.config, ModelConfig)
    dtype, storage = setup.model["dtype"], storage_of(engine.config)
    merged = _parts(engine.layout(), storage, dtype, group)
    return _read(merged.take(engine.storages()))


def _taken(engine: TrainEngine, dtype: str, folder: Path, step: Any) -> list[Taken]:
    """Collect the tensors that this rank owns after each of two steps. Compare them after the
    second step, and after a third step reuses the memory of the first. Each step has a checkpoint
    in a folder with its number.
    """
    config, group = engine.config, dist.new_group(range(dist.get_world_size()))
    parts = _parts(engine.layout(), storage_of(config), dtype, group)
    entries = []
    for number in range(2):
        step(engine, number)
        engine.save(folder / str(number))
        entries.append(parts.take(engine.storages()))
    found = [_read(each) for each in entries]
    step(engine, 2)
    engine.save(folder / "2")
    entries.append(parts.take(engine.storages()))
    assert _read(entries[1]) == found[1], "a copy has changed before its turn"
    return [*found, _read(entries[2])]


def _parts(layout: Layout, storage: Storage, dtype: str, group: dist.ProcessGroup) -> OwnedTensors:
    ranks = tuple(range(dist.get_world_size()))
    return OwnedTensors(
        PlacedLayout(layout, ranks),
        storage,
        dtype,
        hosts={rank: rank // 2 for rank in ranks},
        staging_bytes=4096,
        group=group,
        device=torch.device("cpu"),
        copies=2,
    )


def _read(entries: Any) -> Taken:
    return {e.name: (e.spec.dtype, e.spec.shape, e.data().tobytes()) for e in entries}
