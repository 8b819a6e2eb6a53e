"""More links for a live trial."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmrl.desk.job_counts import add_links
from slurmrl.desk.proposal import propose, propose_resume
from slurmrl.desk.submitting import submit
from slurmrl.errors import UsageError
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import end
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import JobState
from tests.fake_runs import FakeScheduler, task, write_config


@pytest.fixture
def paths(tmp_path: Path, scheduler: FakeScheduler) -> RunPaths:
    """A trial whose jobs are in a fake Slurm."""
    return submitted(tmp_path)


def submitted(folder: Path, *overrides: str) -> RunPaths:
    root = str(folder / "runs")
    found = submit(propose(write_config(folder), overrides, root=root, scheduler="local")).paths
    request = json.loads(found.submission_request(1).read_text())
    found.submission_request(1).write_text(json.dumps({**request, "scheduler": "slurm"}))
    return found


def last_link(scheduler: FakeScheduler, queued: int) -> None:
    waiting = [task(index, JobState.PENDING) for index in range(7, 7 + queued)]
    scheduler.tasks = [task(6, JobState.RUNNING), *waiting]


def test_live_trial_with_few_jobs_gets_more(paths: RunPaths, scheduler: FakeScheduler) -> None:
    last_link(scheduler, queued=1)
    found = add_links(paths)
    assert found is not None
    assert found.jobs is not None
    assert found.jobs.ids == {"trainer": ("41", "42")}
    assert "trainer: job 42" in found.notes[0]
    assert scheduler.done == ["extend trainer"]


def test_dry_run_reports_added_jobs_and_queues_nothing(
    paths: RunPaths, scheduler: FakeScheduler
) -> None:
    last_link(scheduler, queued=1)
    found = add_links(paths, dry_run=True)
    assert found is not None
    assert "more would be added to its chain (trainer: one job array)" in found.notes[0]
    assert scheduler.done == []


def test_live_trial_with_enough_jobs_rejects_resume(
    paths: RunPaths, scheduler: FakeScheduler
) -> None:
    last_link(scheduler, queued=2)
    assert add_links(paths) is None
    with pytest.raises(UsageError, match="is live"):
        submit(propose_resume(paths, []))


def test_ended_or_interrupted_trial_is_resumed(paths: RunPaths, scheduler: FakeScheduler) -> None:
    scheduler.tasks = [task(7, JobState.TIMEOUT)]
    assert add_links(paths) is None
    last_link(scheduler, queued=0)
    end(History(paths.history), Kind.CANCELLED, {})
    assert add_links(paths) is None
    assert scheduler.done == []


def test_single_job_gets_no_further_jobs(tmp_path: Path, scheduler: FakeScheduler) -> None:
    paths = submitted(tmp_path, "cluster.slurm.continue=none")
    assert scheduler.requests[0].groups[0].links == 1
    last_link(scheduler, queued=0)
    assert add_links(paths) is None
