"""Return a submission of one group with three links, in a scripted Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.slurm import SlurmScheduler
from tests.scheduler_contract import request_of
from tests.support.scripted_slurm import Slurm


@pytest.fixture
def slurm() -> Slurm:
    return Slurm()


@pytest.fixture
def scheduler(slurm: Slurm) -> SlurmScheduler:
    return SlurmScheduler(slurm)


@pytest.fixture
def run(tmp_path: Path, scheduler: SlurmScheduler) -> RunPaths:
    request = request_of(tmp_path, "pass", links=3)
    scheduler.submit(request)
    request.run.submission_request(1).write_text("{}")
    return request.run
