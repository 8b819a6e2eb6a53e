"""Errors of the job that measures hardware: too few GPUs, and which rank's error is reported."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.schema import Cluster
from slurmrl.desk import measured_profile
from slurmrl.errors import EnvironmentFailure
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import GroupRequest
from slurmrl.workers import hardware_job

REQUEST: dict[str, Any] = {"ranks_per_host": 2, "gpus": 1, "threads": 1, "slurm": {}}
FIRST_RANK_WAITS = """\
import os, sys, time
from pathlib import Path
note = Path(sys.argv[-2], "pid")
if sys.argv[-1] == "1":
    while not Path(f"{note}.0").exists():
        time.sleep(0.01)
    Path(f"{note}.new").write_text(str(os.getpid()))
    os.rename(f"{note}.new", note)
    sys.exit("no space left")
Path(f"{note}.0").write_text(str(os.getpid()))
while not note.exists() or Path("/proc", note.read_text()).exists():
    time.sleep(0.01)
time.sleep(600)  # as in a collective
"""
FIRST_IS_AN_ECHO = f"""\
import sys
print("message of rank", sys.argv[-1], file=sys.stderr)
sys.exit({hardware_job.ECHO} if sys.argv[-1] == "0" else 1)
"""


def measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, program: str, **request: Any
) -> dict[str, Any]:
    script = folder / "rank.py"
    script.write_text(program)
    monkeypatch.setattr(hardware_job, "interpreter", lambda *_: [sys.executable, str(script)])
    return hardware_job.measure_host(folder, 0, {**REQUEST, **request})


@pytest.mark.parametrize("seen", ["0", "GPU-5f", "3"])
def test_too_few_gpus_give_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    found = measured(tmp_path, monkeypatch, "raise AssertionError")
    assert found["error"] == f"the job has 1 GPUs ({seen}) for 2 ranks: set --ranks"


def test_rank_that_failed_first_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(tmp_path, monkeypatch, FIRST_RANK_WAITS, gpus=0)
    os.kill(int((tmp_path / "pid.0").read_text()), signal.SIGKILL)
    assert (found["error"], found["echo"]) == ("rank 1 ended with 1: no space left", False)


def test_consequence_is_not_reported_if_another_rank_has_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(tmp_path, monkeypatch, FIRST_IS_AN_ECHO, gpus=0)
    assert (found["error"], found["echo"]) == ("rank 1 ended with 1: message of rank 1", False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    only = FIRST_IS_AN_ECHO.replace('== "0"', '!= "x"')
    monkeypatch.setattr(hardware_job, "ECHO_S", 0.1)
    assert measured(tmp_path, monkeypatch, only)["echo"] is True


def test_cause_of_another_host_is_reported_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = GroupRequest(name="profile", hosts=2)
    job = measured_profile.ProfileJob(
        RunPaths(tmp_path), "slurm", Cluster(), group, 1.0, lambda text: None
    )
    answers = {
        0: {"host": "n0", "error": "rank 0 ended with 76: closed", "log": "", "echo": True},
        1: {"host": "n1", "error": "rank 1 ended with -9: killed", "log": "", "echo": False},
    }
    monkeypatch.setattr(job, "ended", lambda: (None, ""))
    monkeypatch.setattr(job, "answers", lambda: answers)
    monkeypatch.setattr(measured_profile, "clear_away", lambda jobs: None)
    with pytest.raises(EnvironmentFailure, match="host n1: rank 1 ended with -9: killed"):
        job.points()
