"""How many tasks of an elastic group are added or ended."""

from __future__ import annotations

import pytest

from slurmrl.scheduler.base import JobState, TaskState
from slurmrl.scheduler.elastic import Change, balance


def tasks(running: int, queued: int) -> list[TaskState]:
    states = [JobState.RUNNING] * running + [JobState.PENDING] * queued
    return [
        TaskState(f"41_{index}", "rollout", index, state, state.value, "", ())
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
def test_balance(desired: int, running: int, queued: int, throttle: int, change: Change) -> None:
    assert balance(desired, tasks(running, queued), throttle) == change


def test_what_is_too_much_ends_the_youngest_first() -> None:
    change = balance(1, tasks(3, 2), 3)
    assert [task.element for task in change.cancel] == [2, 3]
    assert (change.submit, change.throttle) == (0, 1)


def test_nothing_wanted_ends_everything() -> None:
    change = balance(0, tasks(2, 2), 3)
    assert sorted(task.element for task in change.cancel) == [1, 2, 3, 4]
    assert (change.submit, change.throttle) == (0, None)
