"""The report that a trial writes to its directory at its end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slurmrl.run.history.slots import Kind
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import JobState
from slurmrl.watch.overview import collect
from slurmrl.workers.supervisor import end_of_trial
from tests.fake_runs import FakeRun, FakeScheduler, task


def ended_trial(root: Path, kind: Kind | None, config: str = "seed: 1\n") -> FakeRun:
    run = FakeRun(root)
    run.paths.config.write_text(config)
    run.submission()
    run.begin(job="41.0.0")
    run.metrics({"step": 1, "reward": 0.5})
    if kind is not None:
        run.end(kind, step=1, reason="steps")
    return run


def shown_report(paths: RunPaths) -> str | None:
    scheduler = FakeScheduler([task(0, JobState.RUNNING)])
    (status,) = collect([paths], lambda kind: scheduler, sleep=lambda _: None)
    path: str | None = status["report"]
    return path


@pytest.mark.parametrize("kind", [Kind.FINISHED, Kind.FAILED])
def test_ended_trial_has_a_report_named_by_its_status(tmp_path: Path, kind: Kind) -> None:
    run = ended_trial(tmp_path, kind)
    assert shown_report(run.paths) is None
    end_of_trial.write_report(run.paths)
    assert '"reward"' in run.paths.report.read_text()
    assert shown_report(run.paths) == str(run.paths.report)


@pytest.mark.parametrize(
    ("kind", "config"),
    [(None, ""), (Kind.CANCELLED, ""), (Kind.FINISHED, "logging: {report: false}\n")],
)
def test_report_is_not_written_for_live_or_cancelled_trials_or_if_disabled(
    tmp_path: Path, kind: Kind | None, config: str
) -> None:
    run = ended_trial(tmp_path, kind, config)
    end_of_trial.write_report(run.paths)
    assert not run.paths.report.exists()


@pytest.mark.parametrize("script", ["exec sleep 1000", "exit 3", ""])
def test_failing_or_hanging_report_causes_no_delay(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write the program of the report; an empty script means that it is missing."""
    program = tmp_path / "python"
    if script:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    run = ended_trial(tmp_path, Kind.FINISHED)
    end_of_trial.write_report(run.paths, within_s=0.3)
    assert not run.paths.report.exists()
