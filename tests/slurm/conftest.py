"""A private Slurm of 4 nodes with 4 fake GPUs each, shared by the tests of this lane."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTBED = Path(__file__).parents[2] / "scripts" / "slurm-testbed"
NODES = 4
GPUS = 4
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "srun")
SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
"""Directories of Slurm's daemons, which an ordinary user's PATH may lack."""


@dataclass(frozen=True)
class SlurmBed:
    directory: Path
    nodes: int
    gpus: int

    @property
    def conf(self) -> Path:
        """The value of SLURM_CONF while a test of this lane runs."""
        return self.directory / "slurm.conf"


@pytest.fixture(scope="session")
def slurm_bed() -> Iterator[SlurmBed]:
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]
    if missing:
        pytest.skip(f"Slurm is not installed here: no {', '.join(missing)} (see scripts/test)")
    # pytest's own folders have names too long for munge's socket.
    with tempfile.TemporaryDirectory(prefix="slurm-bed-") as directory:
        bed = SlurmBed(Path(directory), NODES, GPUS)
        _testbed("up", "--nodes", str(NODES), "--gpus", str(GPUS), "--dir", directory)
        try:
            yield bed
        finally:
            _testbed("down", "--dir", directory)


@pytest.fixture(autouse=True)
def _slurm_conf(slurm_bed: SlurmBed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm_bed.conf))


def _testbed(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, str(TESTBED), *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
