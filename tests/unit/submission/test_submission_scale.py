"""The number of rollout tasks of a trial, as its user changes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmrl.cli.main import main
from slurmrl.desk.job_counts import IDLE, WITHIN_SECONDS, set_tasks
from slurmrl.desk.proposal import propose, propose_resume
from slurmrl.desk.submitting import submit
from slurmrl.errors import UsageError
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import end
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import batch_script
from slurmrl.scheduler.base import JobState
from slurmrl.scheduler.submission import wanted_tasks
from tests.fake_runs import FakeScheduler, task, write_config

GRPO = (
    "algorithm={name: grpo, batch_size: 8, n_minibatches: 1}",
    "dataset.type=prompt",
    "reward.name=exact_match",
    "rollout.tasks={max: 3, min: 2}",
)


def submitted(folder: Path, *overrides: str) -> RunPaths:
    root = str(folder / "runs")
    return submit(propose(write_config(folder), overrides, root=root, scheduler="local")).paths


def test_task_count_is_kept_until_changed(
    tmp_path: Path, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    """The count stays in later submissions unless they change rollout.tasks.max."""
    paths = submitted(tmp_path, *GRPO)
    scheduler.tasks = [task(0, JobState.RUNNING)]
    assert main(["scale", "add/1", "5", "--json", "--root", str(tmp_path / "runs")]) == 0
    expected = {"trial": "add/1", "tasks": 5, "before": 3, "note": WITHIN_SECONDS}
    assert json.loads(capsys.readouterr().out) == expected
    scheduler.tasks = []
    found = set_tasks(paths, 0)
    assert (found.before, found.note) == (5, IDLE)
    for change, at_once in (((), 0), (("rollout.tasks.max=4",), 4)):
        request = propose_resume(paths, change).request(2, "0123456789abcdef", 1)
        rollout = request.groups[1]
        held = batch_script.directives(request, rollout).get("hold", False)
        assert (rollout.at_once, held) == (at_once, at_once == 0)


def test_invalid_task_counts_are_rejected(tmp_path: Path, scheduler: FakeScheduler) -> None:
    paths = submitted(tmp_path, *GRPO)
    with pytest.raises(UsageError, match=r"1 tasks are not allowed: rollout\.tasks\.min is 2; 0"):
        set_tasks(paths, 1)
    with pytest.raises(UsageError, match=r"25 tasks are not allowed: the array of add/1 has 24"):
        set_tasks(paths, 25)
    end(History(paths.history), Kind.CANCELLED, {})
    with pytest.raises(UsageError, match=r"add/1 has ended \(cancelled\): slurmrl resume add/1"):
        set_tasks(paths, 2)
    assert wanted_tasks(paths, "rollout", 3) == 3


def test_resumed_trial_waits_for_no_more_tasks_than_allowed(
    tmp_path: Path, scheduler: FakeScheduler
) -> None:
    paths = submitted(tmp_path, *GRPO)
    set_tasks(paths, 2)
    with pytest.raises(UsageError, match=r"min: 3 is not allowed: slurmrl scale has set 2 tasks"):
        propose_resume(paths, ("rollout.tasks.min=3",))
    propose_resume(paths, ("rollout.tasks.min=3", "rollout.tasks.max=4"))
    set_tasks(paths, 0)
    propose_resume(paths, ("rollout.tasks.min=3",))


def test_tasks_in_the_trainers_job_cannot_be_scaled(
    tmp_path: Path, scheduler: FakeScheduler
) -> None:
    """These tasks have no separate job."""
    proposal = propose(
        write_config(tmp_path),
        (*GRPO[:3], "actor.backend=fsdp:d2", "rollout.tasks={}", "rollout.gpus=2-3"),
        root=str(tmp_path / "runs"),
        scheduler="local",
    )
    request = proposal.request(1, "0123456789abcdef", 1)
    assert [(group.name, group.workers_per_host) for group in request.groups] == [("trainer", 4)]
    with pytest.raises(UsageError, match="use GPUs of its trainers' job"):
        set_tasks(submit(proposal).paths, 2)


def test_scale_is_rejected_without_rollout_tasks(tmp_path: Path, scheduler: FakeScheduler) -> None:
    paths = submitted(tmp_path)
    with pytest.raises(UsageError, match="add/1 has no rollout tasks"):
        set_tasks(paths, 2)
