"""Trials from Python."""

from __future__ import annotations

from pathlib import Path

import pytest

import slurmrl
from slurmrl.config.load import load_resolved
from slurmrl.desk import trial_code
from slurmrl.desk.bundling import make_bundle
from slurmrl.errors import ConfigError, UnknownNameError, UsageError, WaitTimeoutError
from slurmrl.run.history.slots import Kind
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import JobIds, JobState, TaskState
from tests.fake_runs import FakeRun, FakeScheduler, task, write_config


def test_python_api_submits_watches_and_resumes_a_trial(
    tmp_path: Path, scheduler: FakeScheduler
) -> None:
    """Another process finds it by its name."""
    root = str(tmp_path / "runs")
    trial = slurmrl.submit(write_config(tmp_path), "trial=7", root=root, scheduler="local")
    assert trial.name == "add/7"
    run = FakeRun(tmp_path / "runs", trial="7")
    run.begin()
    scheduler.tasks = [task(0, JobState.RUNNING)]
    run.paths.metrics.write_text('{"step": 1, "reward": 0.5}\n')
    with pytest.raises(WaitTimeoutError, match="add/7 has not ended"):
        trial.wait(0.0)
    ends = iter([lambda: None, lambda: run.end(Kind.FINISHED, step=1, reason="total_steps")])
    found = slurmrl.trial("add/7", root=root)
    assert found.wait(sleep=lambda seconds: next(ends)())["state"] == "COMPLETED"
    assert found.metrics() == [{"step": 1, "reward": 0.5}]
    assert found.folder == trial.folder == run.paths.run
    scheduler.tasks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_code, "is_this_code", lambda folder: False)
        with pytest.raises(UsageError, match="use slurmrl resume add/7"):
            trial.resume()
    trial.resume("total_steps=9", check=False)
    assert trial.status()["submission"] == 2
    trial.cancel()
    assert trial.wait()["state"] == "CANCELLED"


def test_wait_outlasts_a_silent_scheduler_and_a_gap_between_jobs(
    tmp_path: Path, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = slurmrl.submit(
        write_config(tmp_path), root=str(tmp_path / "runs"), scheduler="local", check=False
    )
    waiting = task(1, JobState.PENDING)
    answers: list[list[TaskState] | None] = [None, None, [], [waiting], [], []]

    ask = scheduler.query

    def query(jobs: JobIds) -> list[TaskState]:
        answer = answers.pop(0)
        scheduler.problem = "squeue did not answer" if answer is None else None
        scheduler.tasks = answer or []
        return ask(jobs)

    monkeypatch.setattr(scheduler, "query", query)
    assert trial.wait(sleep=lambda seconds: None)["state"] == "INTERRUPTED"
    assert answers == [], "the last two reports have no job"


def test_python_api_submits_a_bundle(tmp_path: Path, scheduler: FakeScheduler) -> None:
    file, root = tmp_path / "add.tar", tmp_path / "runs"
    make_bundle(write_config(tmp_path), [], root=None, output=file, packages=None)
    trial = slurmrl.submit(file, "trial=7", root=str(root), scheduler="local", check=False)
    path = Path(load_resolved(RunPaths(trial.folder).config).dataset.path)
    assert path.is_relative_to(root)


def test_python_api_raises_problems_before_writing(
    tmp_path: Path, scheduler: FakeScheduler
) -> None:
    config = write_config(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"prompt": 1}\n')
    with pytest.raises(ConfigError):
        slurmrl.submit(config, root=str(tmp_path / "runs"), scheduler="local")
    with pytest.raises(UnknownNameError):
        slurmrl.trial("add/1", root=str(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()
