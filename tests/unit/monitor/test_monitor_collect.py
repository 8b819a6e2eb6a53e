from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.errors import CorruptFileError
from slurmrl.run.history.slots import Kind
from slurmrl.run.lease import Lease
from slurmrl.scheduler.base import JobState, Scheduler
from slurmrl.watch.overview import collect
from tests.fake_runs import FakeRun, FakeScheduler, task


class Time:
    """A clock that moves during sleeps, and things that happen meanwhile."""

    def __init__(self, *leases: Lease, beat_at_s: float = 0.1) -> None:
        self.now = 0.0
        self.leases = leases
        self.beat_at_s = beat_at_s

    def sleep(self, seconds: float) -> None:
        before, self.now = self.now, self.now + seconds
        if before < self.beat_at_s <= self.now:
            for lease in self.leases:
                lease.beat()

    def clock(self) -> float:
        return self.now


def running(root: Path, trial: str, scheduler: FakeScheduler, job: str) -> tuple[FakeRun, Lease]:
    run = FakeRun(root, trial=trial)
    run.submission()
    run.begin()
    run.attempt(f"{job}_0")
    scheduler.jobs[run.paths.run, 1] = {"trainer": (job,)}
    scheduler.tasks.append(task(0, JobState.RUNNING, job=job))
    lease = Lease(run.paths.lease("trainer", 0, 0))
    lease.beat()
    return run, lease


def test_all_trials_take_one_question_and_one_wait(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    first, moving = running(tmp_path, "1", scheduler, "41")
    second, _ = running(tmp_path, "2", scheduler, "42")
    time = Time(moving)
    statuses = collect(
        [first.paths, second.paths], lambda kind: scheduler, sleep=time.sleep, clock=time.clock
    )
    assert [(one["trial"], one.get("unconfirmed")) for one in statuses] == [
        ("add/1", None),
        ("add/2", True),
    ]
    assert [one["groups"][0]["tasks"][0]["job_id"] for one in statuses] == ["41_0", "42_0"]
    assert scheduler.questions == 1
    assert 0.3 <= time.now <= 0.4, "1.5 heartbeats of 0.2 s for the lease that stands still"


def test_looking_ends_when_all_leases_have_moved(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    run, lease = running(tmp_path, "1", scheduler, "41")
    time = Time(lease)
    (status,) = collect([run.paths], lambda kind: scheduler, sleep=time.sleep, clock=time.clock)
    assert "unconfirmed" not in status
    assert time.now < 0.2


def test_ended_and_waiting_trials_cost_no_wait(tmp_path: Path) -> None:
    scheduler = FakeScheduler([task(0, JobState.PENDING, job="42")])
    ended = FakeRun(tmp_path, trial="1")
    ended.submission()
    ended.end(Kind.CANCELLED)
    waiting = FakeRun(tmp_path, trial="2")
    waiting.submission()
    scheduler.jobs[waiting.paths.run, 1] = {"trainer": ("42",)}
    time = Time()
    statuses = collect(
        [ended.paths, waiting.paths], lambda kind: scheduler, sleep=time.sleep, clock=time.clock
    )
    assert [status["state"] for status in statuses] == ["CANCELLED", "PENDING"]
    assert time.now == 0


def test_a_scheduler_that_does_not_answer_is_named(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    run, lease = running(tmp_path, "1", scheduler, "41")
    scheduler.problem = "squeue did not answer"
    time = Time(lease)

    def make(kind: str) -> Scheduler:
        assert kind == "local"
        return scheduler

    (status,) = collect([run.paths], make, sleep=time.sleep, clock=time.clock)
    assert (status["state"], status["problem"]) == ("RUNNING", "squeue did not answer")


def test_a_job_that_the_scheduler_forgot_is_judged_by_its_lease(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    run, lease = running(tmp_path, "1", scheduler, "41")
    scheduler.tasks = [task(0, JobState.UNKNOWN)]
    time = Time(lease)
    (alive,) = collect([run.paths], lambda kind: scheduler, sleep=time.sleep, clock=time.clock)
    (dead,) = collect([run.paths], lambda kind: scheduler, sleep=time.sleep, clock=time.clock)
    assert (alive["state"], dead["state"]) == ("RUNNING", "INTERRUPTED")


def test_a_broken_run_directory_does_not_hide_the_others(tmp_path: Path) -> None:
    broken, fine = FakeRun(tmp_path, trial="1"), FakeRun(tmp_path, trial="2")
    for run in (broken, fine):
        run.submission()
        run.end(Kind.CANCELLED)
    next(broken.paths.history.iterdir()).write_bytes(b"\x00 not ours")
    told: list[Path] = []
    statuses = collect(
        [broken.paths, fine.paths],
        lambda kind: FakeScheduler(),
        unreadable=lambda paths, error: told.append(paths.run),
    )
    assert [status["trial"] for status in statuses] == ["add/2"]
    assert told == [broken.paths.run]
    with pytest.raises(CorruptFileError):
        collect([broken.paths], lambda kind: FakeScheduler())
