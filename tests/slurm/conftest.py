"""A private Slurm of 4 nodes with 4 fake GPUs each, shared by the tests of this lane."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import beds, paced
from tests.support.chaos_trials.watched import Outcome
from tests.support.nodes import slurm, wait_for_empty_queue
from tests.support.trials import Site

NODES = 4
GPUS = 4


@pytest.fixture(scope="session")
def slurm_bed() -> Iterator[Path]:
    """Return the directory of the test bed."""
    options = ("--nodes", str(NODES), "--gpus", str(GPUS))
    with beds.started(*options, needs=("not installed",)) as directory:
        yield directory


@pytest.fixture(autouse=True)
def _slurm_conf(slurm_bed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm_bed / "slurm.conf"))


@pytest.fixture
def bed(slurm_bed: Path) -> Iterator[Path]:
    """Return the test bed of this folder, without running jobs."""
    yield slurm_bed
    slurm("scancel", "--user", str(os.getuid()))
    wait_for_empty_queue()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Run the trial of `paced` without disturbances on one host without Slurm."""
    folder = tmp_path_factory.mktemp("calm")
    trial = paced.start(folder, "local", cluster={**paced.cluster(folder), "workers_per_host": 2})
    paced.hurry(trial)
    return trial.outcome()
