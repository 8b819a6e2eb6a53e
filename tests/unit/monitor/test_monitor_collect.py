from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmrl.errors import CorruptFileError
from slurmrl.run import keys
from slurmrl.run.history.slots import Kind
from slurmrl.run.lease import Lease
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import JobState, Scheduler
from slurmrl.watch.overview import collect
from tests.fake_runs import FakeRun, FakeScheduler, task
from tests.support.replaced import replace


class Time:
    """A clock that advances during sleeps, and events at given times."""

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


def test_all_trials_share_one_scheduler_query_and_one_wait(tmp_path: Path) -> None:
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


def test_lease_observation_ends_once_all_leases_advanced(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    run, lease = running(tmp_path, "1", scheduler, "41")
    time = Time(lease)
    (status,) = collect([run.paths], lambda kind: scheduler, sleep=time.sleep, clock=time.clock)
    assert "unconfirmed" not in status
    assert time.now < 0.2


def test_ended_and_pending_trials_need_no_lease_observation(tmp_path: Path) -> None:
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


def test_unreachable_scheduler_is_named(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    run, lease = running(tmp_path, "1", scheduler, "41")
    scheduler.problem = "squeue did not answer"
    time = Time(lease)

    def make(kind: str) -> Scheduler:
        assert kind == "local"
        return scheduler

    (status,) = collect([run.paths], make, sleep=time.sleep, clock=time.clock)
    assert (status["state"], status["problem"]) == ("RUNNING", "squeue did not answer")


def test_lease_decides_about_a_job_unknown_to_the_scheduler(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    run, lease = running(tmp_path, "1", scheduler, "41")
    scheduler.tasks = [task(0, JobState.UNKNOWN)]
    time = Time(lease)
    (alive,) = collect([run.paths], lambda kind: scheduler, sleep=time.sleep, clock=time.clock)
    (dead,) = collect([run.paths], lambda kind: scheduler, sleep=time.sleep, clock=time.clock)
    assert (alive["state"], dead["state"]) == ("RUNNING", "INTERRUPTED")


def test_broken_run_directory_does_not_hide_other_trials(tmp_path: Path) -> None:
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


def test_damaged_job_names_do_not_hide_other_trials(tmp_path: Path) -> None:
    class Damaged(FakeScheduler):
        def recover(self, run: RunPaths, number: int) -> dict[str, tuple[str, ...]]:
            if run.run == broken.paths.run:
                raise CorruptFileError("jobs.json is not JSON")
            return super().recover(run, number)

    scheduler, told = Damaged(), list[str]()
    broken, _ = running(tmp_path, "1", scheduler, "41")
    fine, lease = running(tmp_path, "2", scheduler, "42")
    time = Time(lease)
    statuses = collect(
        [broken.paths, fine.paths],
        lambda kind: scheduler,
        unreadable=lambda paths, error: told.append(f"{paths.full_name}: {error}"),
        sleep=time.sleep,
        clock=time.clock,
    )
    assert [(one["trial"], one["state"]) for one in statuses] == [("add/2", "RUNNING")]
    assert told == ["add/1: jobs.json is not JSON"]
    with pytest.raises(CorruptFileError):
        collect([broken.paths], lambda kind: scheduler)


@pytest.mark.parametrize("kind", ["folder", "fifo", "link"])
def test_status_works_if_a_lease_file_was_replaced(tmp_path: Path, kind: str) -> None:
    scheduler = FakeScheduler()
    run, _ = running(tmp_path, "1", scheduler, "41")
    replace(run.paths.lease("trainer", 0, 0), kind)
    time = Time()
    (status,) = collect([run.paths], lambda kind: scheduler, sleep=time.sleep, clock=time.clock)
    assert (status["state"], status["unconfirmed"]) == ("RUNNING", True)


SIGNAL = "was ended by signal 9 (SIGKILL)"


@pytest.fixture
def resumed(tmp_path: Path) -> tuple[FakeRun, FakeScheduler]:
    """A trial of two submissions: the first one's job was killed, the second one's waits."""
    run = FakeRun(tmp_path)
    run.submission(1, "slurm")
    run.attempt("41_0", job="41.0.0")
    run.begin(job="41.0.0", submission=1, link=0)
    run.submission(2, "slurm")
    killed = task(0, JobState.FAILED, job="41", signal=9, words=SIGNAL)
    scheduler = FakeScheduler([killed, task(0, JobState.PENDING, job="42")])
    scheduler.jobs[run.paths.run, 1] = {"trainer": ("41",)}
    scheduler.jobs[run.paths.run, 2] = {"trainer": ("42",)}
    return run, scheduler


def seen(run: FakeRun, scheduler: FakeScheduler) -> dict[str, Any]:
    time = Time()
    make = lambda kind: scheduler  # noqa: E731
    (status,) = collect([run.paths], make, detailed=True, sleep=time.sleep, clock=time.clock)
    return status


@pytest.mark.parametrize("end", [None, Kind.FINISHED, Kind.FAILED])
def test_cause_known_to_the_scheduler_is_shown_after_a_resume(
    resumed: tuple[FakeRun, FakeScheduler], end: Kind | None
) -> None:
    run, scheduler = resumed
    if end is not None:
        run.attempt("42_0", number=1, job="42.0.0")
        run.begin(job="42.0.0", submission=2, link=0)
        run.end(end, reason="total_steps", step=60)
    status = seen(run, scheduler)
    first = status["incarnations"][0]
    assert (first["cause"], first["how"]) == ("killed", f"job 41_0: {SIGNAL}")
    assert status["groups"][0]["tasks"][0]["job_id"] == "42_0", "not the earlier job"
    assert status["state"] == {None: "PENDING", Kind.FINISHED: "COMPLETED"}.get(end, "FAILED")


def test_signal_of_an_earlier_submission_is_explained(
    resumed: tuple[FakeRun, FakeScheduler],
) -> None:
    """The signal alone looks like a preemption."""
    run, scheduler = resumed
    run.name(keys.warned(1), cause="preemption", signal="SIGTERM")
    assert seen(run, scheduler)["incarnations"][0]["how"] == f"job 41_0: {SIGNAL}"


def test_status_works_if_the_jobs_of_an_earlier_submission_are_damaged(
    resumed: tuple[FakeRun, FakeScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, scheduler = resumed
    recover = scheduler.recover

    def damaged(paths: RunPaths, number: int) -> dict[str, tuple[str, ...]]:
        if number == 1:
            raise CorruptFileError("jobs.json is not JSON")
        return recover(paths, number)

    monkeypatch.setattr(scheduler, "recover", damaged)
    status = seen(run, scheduler)
    assert status["groups"][0]["tasks"][0]["job_id"] == "42_0"


def test_ended_trial_is_shown_without_the_scheduler(
    resumed: tuple[FakeRun, FakeScheduler],
) -> None:
    run, scheduler = resumed
    run.begin(job="42.0.0", submission=2, link=0)
    run.end(Kind.CANCELLED)
    scheduler.problem = "squeue did not answer"
    status = seen(run, scheduler)
    assert "problem" not in status
    assert status["incarnations"][0]["cause"] == "killed"
    assert scheduler.questions == 0


def test_scheduler_is_not_queried_if_run_directories_show_all_ends(
    resumed: tuple[FakeRun, FakeScheduler],
) -> None:
    run, scheduler = resumed
    run.name(keys.failure(1), cause="died", exit_code=-9, rank=3)
    run.begin(job="42.0.0", submission=2, link=0)
    run.end(Kind.FINISHED, reason="total_steps", step=60)
    seen(run, scheduler)
    assert scheduler.questions == 0
