"""The commands with the real local scheduler; a stand-in takes the place of the workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmrl.desk.trial_jobs import newest_jobs
from slurmrl.env import user_name
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.metrics import read
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import SubmissionRequest
from slurmrl.scheduler.local_chain import LocalScheduler
from tests.fake_runs import write_config

STAND_IN = Path(__file__).with_name("stand_in.py")
TIMEOUT_S = 60.0


class StandInScheduler(LocalScheduler):
    """The local scheduler whose links execute a stand-in."""

    def submit(self, request: SubmissionRequest) -> dict[str, tuple[str, ...]]:
        steps, mode = os.environ["STAND_IN"].split()
        command = (request.python, "-P", str(STAND_IN), str(request.run.run), steps, mode)
        groups = tuple(replace(group, command=command) for group in request.groups)
        return super().submit(replace(request, groups=groups))


LAUNCH = f"""
import sys
sys.path.insert(0, {str(STAND_IN.parents[3])!r})
from slurmrl.cli.main import main
from slurmrl.scheduler import SCHEDULERS
from slurmrl.desk import trial_code
trial_code.is_this_code = lambda folder: True  # the stand-in is in no snapshot
SCHEDULERS._entries["local"] = "test_cli_local_run:StandInScheduler"
sys.path.insert(0, {str(STAND_IN.parent)!r})
sys.exit(main())
"""


class Desk:
    """The folder in which a user runs commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = write_config(folder)
        self.paths = RunPaths.of(folder / "runs", user_name(), "add", "1")

    def start(self, *arguments: str, steps: int = 5, mode: str = "train") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *arguments],
            cwd=self.folder,
            env={**os.environ, "STAND_IN": f"{steps} {mode}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **options: Any) -> tuple[int, str, str]:
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, out, err

    def submit(self, *more: str, **options: Any) -> tuple[int, str, str]:
        return self.run("submit", str(self.config), "--scheduler", "local", *more, **options)

    def status(self) -> dict[str, Any]:
        code, out, err = self.run("status", "add/1", "--json")
        assert code == 0, err
        status: dict[str, Any] = json.loads(out)
        return status

    def kinds(self) -> list[Kind]:
        return [record.kind for record in History(self.paths.history).read()]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    jobs = newest_jobs(desk.paths)
    if jobs is not None:
        jobs.scheduler.kill(jobs.ids)


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_submit_follows_a_run_to_its_end(desk: Desk) -> None:
    process = desk.start("submit", str(desk.config), "--scheduler", "local", mode="held")
    assert process.stdout is not None
    lines = []
    while not (lines and lines[-1].startswith("step 1/")):
        lines.append(process.stdout.readline())
        assert lines[-1], "it ended"
    (desk.paths.run / "go").touch()
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, err) == (0, "")
    lines = "".join([*lines, out]).splitlines()
    assert "RUNNING" in lines
    assert lines[0].startswith("add/1 submitted to local (trainer: local-")
    assert [line for line in lines if line.startswith("step ")] == [
        f"step {step}/6  reward {step / 5:.4g}  tokens_per_s 10" for step in range(1, 6)
    ]
    assert "add/1 COMPLETED: step 5/6, last commit step 5" in lines
    begin = History(desk.paths.history).read()[0]
    assert begin.data["code"] == str(desk.paths.code / "slurmrl" / "__init__.py")
    assert desk.status()["state"] == "COMPLETED"
    code, out, _ = desk.run("logs", "add/1")
    assert (code, out) == (0, "stand-in of incarnation 1 at step 0\n")


def test_failed_run_exits_with_1_and_the_reason(desk: Desk) -> None:
    code, out, _ = desk.submit(mode="fail")
    assert code == 1
    assert "ValueError: planted" in out
    assert "Traceback …" in out
    assert desk.status()["reason"] == "ValueError: planted"
    code, out, _ = desk.submit("--json")
    assert code == 0
    assert json.loads(out)["status"]["state"] == "COMPLETED"
    assert Kind.RESUME in desk.kinds()


def test_ctrl_c_stops_a_run_between_steps_and_resume_continues(desk: Desk) -> None:
    process = desk.start("submit", str(desk.config), "--scheduler", "local", steps=100_000)
    wait(lambda: len(read(desk.paths.metrics)) >= 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, err) == (130, "")
    assert "stopping at the next step" in out
    assert "slurmrl resume add/1" in out
    committed = desk.status()
    assert committed["state"] == "INTERRUPTED"
    step = committed["checkpoint"]["step"]
    assert step >= 3
    code, out, _ = desk.run("resume", "add/1", steps=step + 2)
    assert code == 0
    assert f"continues from step {step}" in out
    assert [line["step"] for line in read(desk.paths.metrics)] == list(range(1, step + 3))


def test_detached_run_appears_in_status_and_can_be_cancelled(desk: Desk) -> None:
    code, _, err = desk.submit("--detach", steps=100_000)
    assert (code, err) == (0, "")
    wait(lambda: len(read(desk.paths.metrics)) >= 1)
    status = desk.status()
    assert (status["state"], status["incarnation"]) == ("RUNNING", 1)
    assert "unconfirmed" not in status
    assert status["groups"][0]["links_left"] == 7
    code, _, err = desk.submit()
    assert code == 2
    assert "add/1 is live (job local-" in err
    follower = desk.start("logs", "add/1", "-f")
    assert follower.stdout is not None
    assert follower.stdout.readline() == "stand-in of incarnation 1 at step 0\n"
    assert desk.run("cancel", "add/1")[0] == 0
    follower.communicate(timeout=TIMEOUT_S)
    assert follower.returncode == 0
    assert desk.status()["state"] == "CANCELLED"
    code, _, _ = desk.run("resume", "add/1", steps=2)
    assert code == 0
    assert desk.kinds() == [
        Kind.BEGIN,
        Kind.CANCELLED,
        Kind.RESUME,
        Kind.BEGIN,
        Kind.COMMIT,
        Kind.FINISHED,
    ]
