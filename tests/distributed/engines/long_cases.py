"""Functions that ranks run in the tests of long sequences."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from slurmrl.data.sample import SequenceSample
from tests.distributed.engines.cases import Setup, denominator, loss, make

CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
PEAK = "5"
"""Written to ``clear_refs``, it resets the peak of resident memory."""


@dataclass(frozen=True)
class LongStep:
    """A rank's view of training steps on long sequences."""

    stats: list[dict[str, float]]
    seconds: list[float]
    cpu_seconds: float
    """CPU seconds of all steps."""
    started_bytes: int
    """Resident memory of the process with its model."""
    peak_bytes: int


def resident(name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def train_long(
    setup: Setup,
    lengths: tuple[int, ...],
    steps: range = range(1),
    load: Path | None = None,
    save: Path | None = None,
) -> tuple[LongStep, list[str]]:
    """Train on random tokens; return the steps and the checksums of the files that were saved."""
    engine = make(setup)
    if load is not None:
        engine.load(load)
    vocabulary, tokens = setup.model["architecture"]["vocab_size"], sum(lengths)
    dist.barrier()
    CLEAR.write_text(PEAK)
    started, stats, seconds = resident("VmRSS"), [], []
    computed = time.process_time()
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        sample = SequenceSample.from_default(
            lengths,
            [f"item{index}" for index in range(len(lengths))],
            {
                "input_ids": torch.randint(vocabulary, (tokens,), generator=generator),
                "advantages": torch.randn(tokens, generator=generator),
            },
        )
        begin = time.monotonic()
        stats.append(engine.train_batch(sample, loss, denominator(sample)))
        seconds.append(time.monotonic() - begin)
    computed = time.process_time() - computed
    made = LongStep(stats, seconds, computed, started, resident("VmHWM"))
    return made, [] if save is None else [file.checksum for file in engine.save(save)]
