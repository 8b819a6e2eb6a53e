"""Slurm's estimate of the time that a trial would wait in the queue."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from slurmrl.desk.proposal import UNNAMED, propose
from slurmrl.desk.slurm_check import TIMEOUT_S
from slurmrl.run.reports import TRAINERS
from slurmrl.scheduler.batch_script import expected_start
from slurmrl.scheduler.client import SlurmClient


def expected_wait_s(config: Path, overrides: Sequence[str], root: str | None) -> float:
    """Return the seconds until Slurm expects to start the trainers' job; submit nothing.

    Raises ConfigError for a configuration that cannot be submitted, SchedulerError without an
    answer of Slurm.
    """
    request = propose(config, overrides, root=root, scheduler="slurm").request(1, UNNAMED, 1)
    start = expected_start(SlurmClient(timeout_s=TIMEOUT_S), request, TRAINERS)
    return max((start - datetime.now()).total_seconds(), 0.0)
