"""Commands on copies of a run directory do not change the jobs of the original."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import make, submission
from tests.fake_runs import FakeRun


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    """A trial whose first submission has a job."""
    fake = FakeRun(tmp_path / "runs")
    fake.submission(run=str(fake.paths.run))
    fake.paths.config.touch()
    submission.write_jobs(fake.paths, 1, {"trainer": ("41",)})
    return fake


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_copied_run_has_no_jobs_and_moved_run_keeps_its_jobs(
    tmp_path: Path, run: FakeRun, kind: str
) -> None:
    scheduler = make(kind)
    assert scheduler.recover(run.paths, 1) == {"trainer": ("41",)}
    (tmp_path / "link").symlink_to(run.paths.run)
    assert scheduler.recover(RunPaths(tmp_path / "link"), 1) == {"trainer": ("41",)}
    copy = RunPaths(tmp_path / "copy")
    shutil.copytree(run.paths.run, copy.run)
    assert scheduler.recover(copy, 1) == {}
    shutil.rmtree(run.paths.run)
    assert scheduler.recover(copy, 1) == {"trainer": ("41",)}
    (run.paths.run / "logs").mkdir(parents=True)  # a process that still runs writes there
    assert scheduler.recover(copy, 1) == {"trainer": ("41",)}


def test_copied_submission_of_old_version_is_not_detected(tmp_path: Path, run: FakeRun) -> None:
    run.submission()
    copy = RunPaths(tmp_path / "copy")
    shutil.copytree(run.paths.run, copy.run)
    assert not submission.is_copied(copy, 1)
    assert not submission.is_copied(copy, 2), "never made"
