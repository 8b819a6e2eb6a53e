"""Tests of the number of tasks of an elastic group that are added or held."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.errors import CorruptFileError
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import JobState, TaskState
from slurmrl.scheduler.slurm import HELD, Change, ElasticGroup, SlurmScheduler, balance
from slurmrl.scheduler.submission import (
    Orphaned,
    is_orphaned,
    read_orphaned,
    remove_orphaned,
    set_wanted_tasks,
    wanted_tasks,
    write_orphaned,
)
from tests.fake_runs import FakeRun, task
from tests.support.scripted_slurm import Slurm


def tasks(running: int, queued: int, held: int = 0) -> list[TaskState]:
    states = [JobState.RUNNING] * running + [JobState.PENDING] * (queued + held)
    reasons = [""] * (1 + running + queued) + [HELD] * held
    return [
        TaskState(f"41_{index}", "rollout", index, state, state.value, reasons[index], ())
        for index, state in enumerate([JobState.FAILED, *states])
    ]


@pytest.mark.parametrize(
    ("desired", "running", "queued", "throttle", "change"),
    [
        (3, 3, 0, 3, Change()),
        (3, 3, 5, 3, Change()),  # spares stay
        (3, 2, 1, 3, Change()),  # a spare is about to start
        (3, 2, 0, 3, Change(submit=1)),
        (3, 0, 0, 3, Change(submit=3)),
        (5, 3, 1, 3, Change(submit=1, throttle=5)),
        (5, 3, 9, 3, Change(throttle=5)),
    ],
)
def test_balance_adjusts_queued_tasks_and_throttle(
    desired: int, running: int, queued: int, throttle: int, change: Change
) -> None:
    assert balance(desired, tasks(running, queued), throttle) == change


def test_surplus_running_tasks_are_not_cancelled() -> None:
    """The master asks some tasks to leave, and no other task starts."""
    assert balance(1, tasks(3, 2), 3) == Change(throttle=1)


def test_queued_tasks_are_held_if_the_wanted_number_is_0() -> None:
    assert balance(0, tasks(2, 2), 3) == Change(hold=True)
    assert balance(0, tasks(2, 1, held=2), 3) == Change(hold=True)
    assert balance(0, tasks(2, 0, held=2), 3) == balance(0, tasks(2, 0), 3) == Change()
    assert balance(2, tasks(1, 0, held=2), 2) == Change(release=True)


def test_balance_sets_an_unknown_throttle() -> None:
    assert balance(3, tasks(3, 2), None) == Change(throttle=3)


def test_task_count_of_the_user_is_kept_until_the_plan_changes(run: RunPaths) -> None:
    assert wanted_tasks(run, "rollout", 4) == 4
    set_wanted_tasks(run, "rollout", 0, 4)
    assert (wanted_tasks(run, "rollout", 4), wanted_tasks(run, "trainer", 4)) == (
        0,
        4,
    )
    assert wanted_tasks(run, "rollout", 6) == 6
    run.scale("rollout").write_text("{}")
    with pytest.raises(CorruptFileError, match=r"scale\.rollout\.json"):
        wanted_tasks(run, "rollout", 4)


@pytest.mark.parametrize(
    ("trainers", "done"),
    [
        ([JobState.CANCELLED, JobState.PENDING], "hold 41_[3-5]"),
        ([JobState.RUNNING], "hold 41_[3-5]"),
        ([JobState.CANCELLED, JobState.TIMEOUT], "cancel 41_[3-5]"),
        ([], "cancel 41_[3-5]"),  # Slurm has forgotten them
    ],
)
def test_queued_tasks_are_cancelled_without_a_trainers_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slurm: Slurm,
    trainers: list[JobState],
    done: str,
) -> None:
    everybody = [task(index, state, job="40") for index, state in enumerate(trainers)]
    everybody += tasks(2, 3)
    jobs = {"trainer": ("40",), "rollout": ("41",)}
    monkeypatch.setattr(SlurmScheduler, "recover", lambda *arguments: jobs)
    monkeypatch.setattr(SlurmScheduler, "query", lambda *arguments: everybody)
    ElasticGroup(RunPaths(tmp_path), 1, "rollout", slurm, by="41_1").leave_alone()
    assert slurm.done == [done]


def test_orphaned_tasks_are_held_until_trainers_return(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path)
    number = fake.begin()
    assert not is_orphaned(fake.paths, "rollout")
    seen = Orphaned(incarnation=number, attempt=3, counter=7)
    write_orphaned(fake.paths, "rollout", seen)
    assert read_orphaned(fake.paths, "rollout") == seen
    assert is_orphaned(fake.paths, "rollout")
    fake.begin()
    assert not is_orphaned(fake.paths, "rollout")
    remove_orphaned(fake.paths, "rollout")
    remove_orphaned(fake.paths, "rollout")
    assert read_orphaned(fake.paths, "rollout") is None
