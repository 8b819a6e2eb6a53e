"""Functions that ranks run in the tests of loading into another layout."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.distributed.transfer.move_cases import Side, engines
from tests.support.host_memory import peak_bytes

BLOCK_BYTES = 1 << 16


def loaded(sides: list[Side], architecture: dict[str, Any], directory: Path) -> tuple[int, int]:
    """Save the first side's model and load it in the second side's layout. Return the peak of bytes
    that loading allocates (by torch and Python), and the bytes of this rank's weights.
    """
    source, target = (engine for engine in engines(sides, architecture) if engine is not None)
    source.save(directory)
    dist.barrier()
    target.role = source.role
    peaks = []

    def load() -> None:
        tracemalloc.start()
        try:
            target.load(directory)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()

    with mock.patch("slurmrl.tensors.checkpoint.shards.BLOCK_BYTES", BLOCK_BYTES):
        target.load(directory)
        allocated = peak_bytes(load)
    dist.barrier()
    return allocated + peaks[0], sum(t.nbytes for t in target.storages().values())
