"""Functions that ranks run in the tests of layouts: see ``cases``."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.data.sample import SequenceSample
from slurmrl.tensors.checkpoint import shards
from slurmrl.workers.worker.step_batch import share
from tests.distributed.engines.cases import Setup, batch, context, make


def held(setup: Setup) -> list[tuple[str, tuple[int, ...], Tensor]]:
    """Return this rank's shards, with name, start of the box and values of the box."""
    engine = make(setup)
    held = engine._shards  # type: ignore[attr-defined]
    local = held.local() | held.decoder.constants()
    shards = engine.layout().held_by(dist.get_rank())
    assert {shard.name for shard in shards} == {n for n, p in local.items() if p.numel()}
    for shard in shards:
        assert tuple(local[shard.name].shape) == shard.box.size, shard.name
        assert local[shard.name].is_contiguous()
    return [(shard.name, shard.box.start, local[shard.name].clone()) for shard in shards]


def decaying(setup: Setup) -> set[str]:
    """The names of the parameters that weight decay changes."""
    return set(make(setup)._optimizer.matrices)  # type: ignore[attr-defined]


def load_from_few_files(setup: Setup, folder: Path, needed: Sequence[Sequence[int]]) -> int:
    """Load a checkpoint of which each rank sees only the files of its ``needed`` ranks. Return the
    peak of allocated bytes in addition to the engine's tensors, with blocks of 64 KiB.
    """
    engine = make(setup)
    rank = dist.get_rank()
    own = folder / f"seen by {rank}"
    own.mkdir()
    for name in ("actor.layout.json", *(f"actor.{other}.safetensors" for other in needed[rank])):
        os.link(folder / name, own / name)
    tracemalloc.start()
    try:
        with mock.patch.object(shards, "BLOCK_BYTES", 2**16):
            engine.load(own)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def forward(setup: Setup) -> dict[str, Tensor]:
    engine = make(setup)
    sample = batch().take(setup.split[engine.context.dp_rank])
    return engine.forward(sample, temperature=0.7)


def shared(setup: Setup) -> list[Any]:
    """Return the sample of each rank after the first rank of each group has sent its sample to the
    others.
    """
    place = context(setup)
    rank = dist.get_rank()
    sample = SequenceSample.from_default(
        [2, 1],
        [f"a{rank}", "b"],
        {
            "input_ids": torch.tensor([rank, 5, 6]),
            "logprobs": torch.tensor([0.5, rank, -1.0]),
            "values": None,
        },
        {"row": [{"rank": rank}, None]},
        per_sequence={"finished": torch.tensor([True, False])},
    )
    got = share(sample, place)
    empty = share(sample.take([]), place)
    assert got is not None
    assert empty is not None
    assert empty.bs == 0
    assert share(None, place) is None
    data = {k: None if t is None else (t.tolist(), t.dtype) for k, t in got.data.items()}
    return [got.ids, got.lengths, got.metadata, data]
