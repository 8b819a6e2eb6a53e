from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmrl.cli import following
from slurmrl.cli.following import TrialFollower, View, exit_code
from slurmrl.desk.trial_jobs import Jobs
from slurmrl.run.history.slots import Kind
from slurmrl.scheduler.base import JobState
from tests.fake_runs import FakeRun, FakeScheduler, task


class Recording(View):
    def __init__(self) -> None:
        self.states: list[str] = []
        self.notes: list[str] = []

    def update(self, status: Any) -> None:
        self.states.append(status["state"])

    def note(self, text: str) -> None:
        self.notes.append(text)


class Scene:
    """A run that is watched, and what happens to it while the watcher sleeps."""

    def __init__(self, root: Path, kind: str = "local") -> None:
        self.run = FakeRun(root)
        self.run.submission()
        self.run.begin()
        self.scheduler = FakeScheduler([task(0, JobState.RUNNING)])
        self.view = Recording()
        self.kind = kind
        self.happenings: list[Callable[[], object]] = []

    def follow(self) -> dict[str, Any]:
        jobs = Jobs(1, self.scheduler, {"trainer": ("41",)})
        return TrialFollower(self.run.paths, self.kind, jobs, self.view, sleep=self._sleep).run()

    def _sleep(self, seconds: float) -> None:
        if self.happenings:
            self.happenings.pop(0)()

    def ctrl_c(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def end(self, kind: Kind, **data: Any) -> None:
        self.run.end(kind, **data)
        self.stop()

    def stop(self, state: JobState = JobState.COMPLETED) -> None:
        self.scheduler.tasks = [task(0, state)]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(following, "POLL_S", {"local": 0.01})
    monkeypatch.setattr(following, "SHARED_POLL_S", 0.01)
    return Scene(tmp_path)


@pytest.mark.parametrize(
    ("kind", "state", "code"),
    [
        (Kind.FINISHED, "COMPLETED", 0),
        (Kind.FAILED, "FAILED", 1),
        (Kind.CANCELLED, "CANCELLED", 130),
    ],
)
def test_follow_returns_when_the_trial_ends(
    scene: Scene, kind: Kind, state: str, code: int
) -> None:
    scene.happenings = [lambda: scene.end(kind, step=6, reason="r")]
    status = scene.follow()
    assert (status["state"], exit_code(status)) == (state, code)
    assert scene.view.states[0] == "RUNNING"
    assert scene.view.states[-1] == state


def test_follow_waits_for_processes_of_an_ended_local_trial(scene: Scene) -> None:
    scene.happenings = [
        lambda: scene.run.end(Kind.FINISHED, step=6, reason="r"),
        lambda: None,
        lambda: scene.stop(),
    ]
    scene.follow()
    assert scene.happenings == []


def test_follow_waits_a_limited_time_for_remaining_processes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "LEAVE_S", 0.05)
    scene.run.end(Kind.FINISHED, step=6, reason="r")
    assert scene.follow()["state"] == "COMPLETED"


def test_second_ctrl_c_kills_the_run(scene: Scene) -> None:
    scene.happenings = [scene.ctrl_c, scene.ctrl_c, lambda: scene.stop(JobState.FAILED)]
    assert exit_code(scene.follow()) == 130
    assert scene.scheduler.done == ["interrupt", "kill"]


def test_run_that_finishes_while_being_stopped_is_complete(scene: Scene) -> None:
    scene.happenings = [
        scene.ctrl_c,
        lambda: scene.end(Kind.FINISHED, step=6, reason="total_steps"),
    ]
    assert exit_code(scene.follow()) == 0


def test_ctrl_c_does_not_stop_a_slurm_job(scene: Scene) -> None:
    scene.kind = "slurm"
    scene.happenings = [scene.ctrl_c]
    status = scene.follow()
    assert (status["state"], exit_code(status)) == ("RUNNING", 130)
    assert scene.scheduler.done == []


def test_follow_restores_the_callers_ctrl_c_handler(scene: Scene) -> None:
    before = signal.getsignal(signal.SIGINT)
    scene.happenings = [lambda: scene.end(Kind.FINISHED, step=6, reason="r")]
    scene.follow()
    assert signal.getsignal(signal.SIGINT) is before


def test_follow_survives_a_scheduler_that_does_not_answer(scene: Scene) -> None:
    def silent() -> None:
        scene.scheduler.problem = "squeue did not answer"

    def answers_again() -> None:
        scene.scheduler.problem = None

    scene.happenings = [
        silent,
        lambda: None,
        answers_again,
        lambda: scene.end(Kind.FINISHED, step=6, reason="r"),
    ]
    assert scene.follow()["state"] == "COMPLETED"
    assert set(scene.view.states[:-1]) == {"RUNNING"}
