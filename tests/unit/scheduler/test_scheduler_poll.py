"""Tests of the interval between queries of a scheduler."""

from __future__ import annotations

import dataclasses

import pytest

from slurmrl.errors import EnvironmentFailure
from slurmrl.scheduler.base import (
    SHARED_LONGEST_S,
    SHARED_SHORTEST_S,
    JobState,
    SchedulerPoll,
    TaskState,
)
from tests.fake_runs import FakeScheduler

JOBS = {"trainer": ("41",)}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler([TaskState("41_0", "trainer", 0, JobState.PENDING, "PENDING", "", ())])


@pytest.fixture
def poll(scheduler: FakeScheduler, clock: Clock) -> SchedulerPoll:
    return SchedulerPoll("slurm", scheduler, clock=clock)


def test_poll_pauses_grow_while_status_is_unchanged(
    poll: SchedulerPoll, scheduler: FakeScheduler, clock: Clock
) -> None:
    assert poll.pause_s == 0
    pauses = []
    for _ in range(10):
        poll.query(JOBS)
        pauses.append(poll.pause_s)
        clock.now += poll.pause_s
    assert pauses[0] == SHARED_SHORTEST_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == SHARED_LONGEST_S
    assert scheduler.questions == 10


def test_poll_pause_is_reset_by_a_change_of_state(
    poll: SchedulerPoll, scheduler: FakeScheduler, clock: Clock
) -> None:
    for _ in range(4):
        poll.query(JOBS)
        clock.now += poll.pause_s
    scheduler.tasks = [dataclasses.replace(scheduler.tasks[0], raw="RUNNING")]
    assert poll.query(JOBS)[0].raw == "RUNNING"
    assert poll.pause_s == SHARED_SHORTEST_S


def test_poll_pause_grows_if_only_remaining_time_changes(
    poll: SchedulerPoll, scheduler: FakeScheduler, clock: Clock
) -> None:
    poll.query(JOBS)
    clock.now += poll.pause_s
    scheduler.tasks = [dataclasses.replace(scheduler.tasks[0], time_left_s=5.0, start="soon")]
    poll.query(JOBS)
    assert poll.pause_s > SHARED_SHORTEST_S


def test_scheduler_is_not_queried_before_it_is_due(
    poll: SchedulerPoll, scheduler: FakeScheduler
) -> None:
    first = poll.query(JOBS)
    assert poll.query(JOBS) == first
    assert scheduler.questions == 1
    poll.query({**JOBS, "rollout": ("42",)})
    assert scheduler.questions == 2


def test_unresponsive_scheduler_is_queried_less_and_less_often(
    poll: SchedulerPoll, scheduler: FakeScheduler, clock: Clock
) -> None:
    scheduler.problem = "away"
    pauses = []
    for _ in range(3):
        with pytest.raises(EnvironmentFailure, match="away"):
            poll.query(JOBS)
        pauses.append(poll.pause_s)
        clock.now += poll.pause_s
    assert pauses == sorted(set(pauses))


def test_missing_answer_is_not_mistaken_for_no_jobs(
    poll: SchedulerPoll, scheduler: FakeScheduler, clock: Clock
) -> None:
    """An older answer for other jobs does not count either."""
    scheduler.problem = "squeue did not answer"
    for _ in range(2):
        with pytest.raises(EnvironmentFailure, match="did not answer"):
            poll.query(JOBS)
    scheduler.problem, clock.now = None, clock.now + poll.pause_s
    answer = poll.query(JOBS)
    scheduler.problem, clock.now = "squeue did not answer", clock.now + poll.pause_s
    with pytest.raises(EnvironmentFailure):
        poll.query(JOBS)
    assert poll.query(JOBS) == answer != []
    for _ in range(2):
        with pytest.raises(EnvironmentFailure):
            poll.query({"trainer": ("41", "42")})
