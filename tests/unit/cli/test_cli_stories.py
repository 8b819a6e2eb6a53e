"""Tests of the complete output of ``slurmrl status`` for runs in different states."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.schema import Logging
from slurmrl.run import keys
from slurmrl.run.history.slots import Kind
from slurmrl.scheduler import reasons
from slurmrl.scheduler.base import JobState, TaskState
from slurmrl.watch.sinks import MetricsRecorder
from tests.fake_runs import FakeRun, FakeScheduler, task
from tests.unit.cli.conftest import Command

GOLDEN = Path(__file__).parent / "stories"
BEGAN = 1767225600.0


class Scene:
    """A run on two Slurm hosts, with a clock that only the test advances."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = BEGAN
        monkeypatch.setattr("time.time", lambda: self.now)
        self.run = FakeRun(root, hosts=2)
        self.run.submission(scheduler="slurm", signal_lead_s=120, time=self.now)
        self.scheduler = FakeScheduler()
        self.scheduler.jobs[self.run.paths.run, 1] = {"trainer": ("41",)}
        monkeypatch.setattr("slurmrl.scheduler.make", lambda kind: self.scheduler)
        beats = itertools.count()
        monkeypatch.setattr("slurmrl.watch.overview.read_counter", lambda path: next(beats))
        self._links = 0

    def link(self, link: int) -> int:
        """Start a link on n0 and n1, whose master begins an incarnation."""
        tag, self._links = f"{100 + link}.0.0", self._links + 1
        for host in (0, 1):
            self.run.attempt(f"41_{link}", task=host, number=link, host=f"n{host}", job=tag)
        supervisor = f"supervisor.trainer.{100 + link}.0"
        self.run.event(supervisor, "start", link=link, job=f"{100 + link}.0", hosts=["n0", "n1"])
        self.run.event(supervisor, "round", round=0, hosts=["n0", "n1"])
        self.now += 20
        return self.run.begin(job=tag, submission=1, link=link)

    def train(self, incarnation: int, first: int, last: int, commits: int = 10) -> None:
        """Train steps of 12 s, of which every ``commits``-th is committed."""
        lost = MetricsRecorder(self.run.paths, Logging(), last_step=first - 1).repeated
        if lost:
            self.run.event(f"master.{incarnation}", "repeats", first=lost[0], last=lost[-1])
        self.run.event(f"master.{incarnation}", "ready", step=first - 1, seconds=14.0)
        for step in range(first, last + 1):
            self.now += 12
            line = {"step": step, "time": self.now, "reward": step / 100, "time/total": 12.0}
            self.run.metrics(line)
            if step % commits == 0:
                self.run.commit(step)
                event = {"step": step, "seconds": 3.0, "stall_s": 0.2}
                self.run.event(f"master.{incarnation}", "commit", **event)
        self.say(incarnation, step=last)

    def say(self, incarnation: int, **said: Any) -> None:
        tasks = {
            f"trainer/{host}": {"lease_age_s": 0.3, "host": f"n{host}", "attempt": self._links - 1}
            for host in (0, 1)
        }
        value = {"phase": "running", "checkpoint": None, "tasks": tasks, **said}
        self.run.say(incarnation, **value, time=self.now)

    def slurm(self, *tasks: TaskState, queued: int = 0) -> None:
        """Return the output of squeue with these elements and the pending elements after them."""
        after = tasks[-1].element + 1
        wait = "JobArrayTaskLimit"
        words = reasons.explain(wait)
        self.scheduler.tasks = list(tasks) + [
            task(after + n, JobState.PENDING, reason=wait, words=words) for n in range(queued)
        ]


def killed_worker(scene: Scene) -> None:
    """Build a run whose first link lost a worker and whose second link was preempted. The third
    link runs.
    """
    first = scene.link(0)
    scene.train(first, 1, 12)
    failure = {"cause": "died", "exit_code": -9, "host": "n1", "rank": 1}
    scene.run.name(keys.failure(first), **failure)
    second = scene.link(1)
    scene.train(second, 11, 24)
    scene.run.commit(24)
    scene.run.name(keys.warned(second), signal="SIGTERM", cause="preemption", time_left_s=30.0)
    scene.run.event(f"master.{second}", "stopped", step=24)
    scene.now += 300
    third = scene.link(2)
    scene.train(third, 25, 41)
    scene.say(third, step=41, checkpoint={"step": 40, "age_s": 12.0})
    ends = [task(0, JobState.FAILED), task(1, JobState.PREEMPTED)]
    running = task(2, JobState.RUNNING, hosts=("n0", "n1"), time_left_s=1500.0)
    scene.slurm(*ends, running, queued=5)


def priority(scene: Scene) -> None:
    scene.now += 10800
    words = reasons.explain("Priority")
    start = "2026-01-01T09:30:00"
    scene.slurm(task(0, JobState.PENDING, reason="Priority", words=words, start=start), queued=7)


def same_exception(scene: Scene) -> None:
    error = {
        "cause": "exception",
        "exception": "ValueError: reward is nan",
        "host": "n0",
        "rank": 0,
        "call": "rewards",
        "step": 4,
    }
    for link in (0, 1):
        number = scene.link(link)
        scene.train(number, 1, 3)
        scene.now += 5
        scene.run.name(keys.failure(number), **error)
        agent = f"agent.trainer.0.{link}"
        scene.run.event(agent, "failure", incarnation=number, cause="exception", rank=0)
    scene.link(2)
    reason = "failed twice in the same way: rank 0, rewards: ValueError: reward is nan"
    trace = 'Traceback (most recent call last):\n  File "my_reward.py", line 7, in judge\n'
    scene.run.end(Kind.FAILED, reason=reason, traceback=f"{trace}ValueError: reward is nan\n")


def no_links_left(scene: Scene) -> None:
    for link in (0, 1):
        number = scene.link(link)
        scene.train(number, 1 + 10 * link, 10 + 10 * link)
        warned = {"signal": "SIGUSR2", "cause": "time_limit", "time_left_s": 120.0}
        scene.run.name(keys.warned(number), **warned)
        scene.run.event(f"master.{number}", "stopped", step=10 + 10 * link)
    scene.slurm(task(0, JobState.TIMEOUT), task(1, JobState.TIMEOUT))


def full_disk(scene: Scene) -> None:
    number = scene.link(0)
    scene.train(number, 1, 39)
    reason = "cannot write checkpoints/step-00000040.1: no space left on the device"
    scene.run.event(f"master.{number}", "checkpoint_failed", step=40, reason=reason)
    scene.now += 2400
    scene.say(number, step=44, checkpoint={"step": 30, "age_s": 2520.0})
    scene.slurm(task(0, JobState.RUNNING, hosts=("n0", "n1"), time_left_s=100.0))


def waits_for_a_rank(scene: Scene) -> None:
    number = scene.link(0)
    scene.train(number, 1, 3)
    waiting = {"for": [1], "what": "to finish gen of step 4", "since_s": 200.0}
    scene.say(number, step=3, waiting=waiting)
    scene.slurm(task(0, JobState.RUNNING, hosts=("n0", "n1")), queued=7)


def killed_batch_process(scene: Scene) -> None:
    number = scene.link(0)
    scene.train(number, 1, 12)
    words = "ended with an exit code or a signal (signal 9, SIGKILL)"
    scene.slurm(
        task(0, JobState.FAILED, words=words),
        task(1, JobState.PENDING, reason="Resources", words=reasons.explain("Resources")),
    )


STORIES: tuple[Callable[[Scene], None], ...] = (
    killed_worker,
    priority,
    same_exception,
    no_links_left,
    full_disk,
    waits_for_a_rank,
    killed_batch_process,
)


@pytest.mark.parametrize("story", STORIES)
def test_status_of_each_scenario_is_printed_as_recorded(
    command: Command,
    story: Callable[[Scene], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURMRL_ROOT", str(tmp_path))
    story(Scene(tmp_path, monkeypatch))
    printed = command("status", "add/1").out.replace(str(tmp_path), "RUNS")
    user = printed.partition("RUNS/")[2].partition("/")[0]
    expected = (GOLDEN / f"{story.__name__}.txt").read_text()
    assert printed.replace(f"RUNS/{user}/", "RUNS/USER/") == expected
