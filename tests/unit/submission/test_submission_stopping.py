"""`slurmrl stop` and the messages of `slurmrl cancel`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmrl.cli.main import main
from slurmrl.desk import trial_jobs
from slurmrl.env import user_name
from slurmrl.errors import ConfigError, Problem, SchedulerError, UsageError
from slurmrl.run.history.slots import Kind
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import Continue, JobState
from slurmrl.scheduler.chain import Chain, TopUp, why_not
from slurmrl.scheduler.submission import stop_requested_by
from slurmrl.watch.overview import collect
from slurmrl.workers.link import reason_to_leave
from tests.fake_runs import FakeRun, FakeScheduler, task


@pytest.fixture
def run(tmp_path: Path, scheduler: FakeScheduler) -> FakeRun:
    """A live trial at step 6, with a commit of step 4."""
    fake = FakeRun(tmp_path)
    fake.submission(scheduler="slurm", **{"continue": Continue.CHAIN})
    fake.begin(submission=1)
    fake.commit(4)
    fake.metrics(*({"step": step, "loss": 1.0} for step in range(1, 7)))
    scheduler.jobs[fake.paths.run, 1] = {"trainer": ("41",)}
    scheduler.tasks = [task(0, JobState.RUNNING), task(1, JobState.PENDING)]
    return fake


def status_of(run: FakeRun, scheduler: FakeScheduler) -> dict[str, Any]:
    return collect([run.paths], lambda kind: scheduler, detailed=True)[0]


def test_stopped_submission_has_no_later_job(run: FakeRun, scheduler: FakeScheduler) -> None:
    assert reason_to_leave(run.paths, 1) is None
    trial_jobs.stop(run.paths)
    assert scheduler.done == ["interrupt"]
    assert reason_to_leave(run.paths, 1) == f"submission 1 was stopped by {user_name()}"
    assert why_not(Chain(run.paths, 1, "trainer"), scheduler, by="41_0") is TopUp.STOPPED
    assert reason_to_leave(run.paths, 2) is None, "resume makes a submission of its own"


def test_stop_cancels_jobs_when_no_trainer_runs(run: FakeRun, scheduler: FakeScheduler) -> None:
    scheduler.tasks = [task(0, JobState.PENDING)]
    trial_jobs.stop(run.paths)
    assert scheduler.done == ["interrupt", "cancel"]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (JobState.RUNNING, "stops at the next step and commits"),
        (JobState.PENDING, "is stopped: its trainers were not running"),
        (JobState.CANCELLED, "is stopped: its trainers were not running"),
        (JobState.UNKNOWN, "is stopped: its trainers were not running"),
    ],
)
def test_stop_announces_a_commit_only_if_trainers_run(
    run: FakeRun,
    scheduler: FakeScheduler,
    capsys: pytest.CaptureFixture[str],
    state: JobState,
    said: str,
) -> None:
    """Rollout tasks that run do not commit."""
    scheduler.jobs[run.paths.run, 1] = {"trainer": ("41",), "rollout": ("42",)}
    scheduler.tasks = [task(0, state), task(0, JobState.RUNNING, job="42")]
    assert main(["stop", "add/1", "--root", str(run.paths.run.parents[2])]) == 0
    assert capsys.readouterr().out.startswith(f"add/1 {said}; to watch it: slurmrl status add/1")


def test_status_names_user_who_stopped_the_trial(run: FakeRun, scheduler: FakeScheduler) -> None:
    trial_jobs.stop(run.paths)
    findings = status_of(run, scheduler)["findings"]
    said = f"stopped by {user_name()}: stops at the next step and commits"
    assert said in [one["text"] for one in findings]
    scheduler.tasks = [task(0, JobState.COMPLETED), task(1, JobState.CANCELLED)]
    status = status_of(run, scheduler)
    assert (status["state"], status["stopped_by"]) == ("INTERRUPTED", user_name())
    assert status["diagnosis"].startswith(f"stopped by {user_name()} (last incarnation: ")
    assert "slurmrl resume add/1" in status["diagnosis"]


def test_wait_returns_when_trainers_have_ended(run: FakeRun, scheduler: FakeScheduler) -> None:
    """Remaining rollout tasks are cancelled at that time."""
    scheduler.jobs[run.paths.run, 1] = {"trainer": ("41",), "rollout": ("42",)}
    scheduler.tasks.append(task(0, JobState.RUNNING, job="42"))
    jobs = trial_jobs.stop(run.paths)

    def commit_and_end(seconds: float) -> None:
        if scheduler.tasks[0].state is JobState.RUNNING:
            run.commit(6)
            scheduler.tasks[:2] = [task(0, JobState.COMPLETED)]

    assert trial_jobs.wait_until_stopped(run.paths, jobs, commit_and_end) == "is stopped at step 6"
    assert scheduler.done == ["interrupt", "cancel"]


@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.COMPLETED, JobState.UNKNOWN])
def test_stop_is_rejected_without_jobs(
    run: FakeRun, scheduler: FakeScheduler, state: JobState
) -> None:
    scheduler.tasks = [task(0, state)]
    with pytest.raises(UsageError, match=r"add/1 has no jobs to stop; .* slurmrl resume add/1"):
        trial_jobs.stop(run.paths)
    assert stop_requested_by(run.paths, 1) == ""


def test_stop_is_rejected_for_an_ended_trial(
    run: FakeRun, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command stops the other trials nevertheless."""
    run.end(Kind.FAILED, reason="x")
    with pytest.raises(UsageError, match="add/1 has already ended: failed"):
        trial_jobs.stop(run.paths)
    root = run.paths.run.parents[2]
    other = FakeRun(root, trial="2")
    other.submission(scheduler="slurm", **{"continue": Continue.CHAIN})
    scheduler.jobs[other.paths.run, 1] = {"trainer": ("41",)}
    assert main(["stop", "add/1", "add/2", "--root", str(root)]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("add/2 stops at the next step and commits; to watch it: slurmrl status")
    assert err == "Error: add/1 has already ended: failed\n"


def test_waiting_stop_reports_all_errors(
    run: FakeRun,
    scheduler: FakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The exit code is the highest of the errors' codes."""
    run.end(Kind.FAILED, reason="x")
    root = run.paths.run.parents[2]
    for trial in ("2", "3"):
        other = FakeRun(root, trial=trial)
        other.submission(scheduler="slurm", **{"continue": Continue.CHAIN})
        scheduler.jobs[other.paths.run, 1] = {"trainer": ("41",)}

    def wait(paths: RunPaths, jobs: object) -> str:
        if paths.trial == "2":
            raise SchedulerError("squeue failed")
        return "is stopped at step 4"

    monkeypatch.setattr(trial_jobs, "wait_until_stopped", wait)
    assert main(["stop", "add/1", "add/2", "add/3", "--wait", "--root", str(root)]) == 3
    out, err = capsys.readouterr()
    assert out.startswith("add/3 is stopped at step 4; to continue it")
    assert err == "Error: add/1 has already ended: failed\nError: squeue failed\n"

    def unreadable(paths: RunPaths) -> None:
        raise ConfigError((Problem("", "cluster", "is wrong"),))

    monkeypatch.setattr(trial_jobs, "stop", unreadable)
    assert main(["stop", "add/2", "add/3", "--root", str(root)]) == 2
    assert capsys.readouterr().err.count("cluster: is wrong") == 2


def test_stop_is_withdrawn_if_the_scheduler_fails(
    run: FakeRun, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FakeScheduler, jobs: object) -> None:
        raise SchedulerError("scancel failed")

    monkeypatch.setattr(FakeScheduler, "interrupt", fail)
    with pytest.raises(SchedulerError, match="scancel failed"):
        trial_jobs.stop(run.paths)
    assert reason_to_leave(run.paths, 1) is None


def test_cancel_names_lost_steps(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(run.paths.run.parents[2])
    assert main(["cancel", "add/1", "--root", root]) == 0
    said = capsys.readouterr().out
    assert "add/1 is cancelled; not committed and lost: steps 5 to 6 (slurmrl stop" in said


@pytest.mark.parametrize(("commit", "lost"), [(5, "lost: step 6 ("), (6, ""), (None, "1 to 6 (")])
def test_cancel_counts_from_last_commit(
    tmp_path: Path,
    scheduler: FakeScheduler,
    capsys: pytest.CaptureFixture[str],
    commit: int | None,
    lost: str,
) -> None:
    fake = FakeRun(tmp_path)
    fake.begin()
    if commit is not None:
        fake.commit(commit)
    fake.metrics(*({"step": step} for step in range(1, 7)))
    assert main(["cancel", "add/1", "--root", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert lost in said
    assert ("lost" in said) is bool(lost)
