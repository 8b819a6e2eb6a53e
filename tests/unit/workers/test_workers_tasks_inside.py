"""Rollout tasks in the trainers' job: their GPUs, hosts and restarts."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable

import pytest

from slurmrl.fsio import documents
from slurmrl.name_resolve.store import NameStore
from slurmrl.plan.model import Plan
from slurmrl.run import keys
from slurmrl.run.events import EventWriter, read_all
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Identity
from slurmrl.workers.agent.agent_host import Host
from slurmrl.workers.supervisor import tasks_inside
from slurmrl.workers.supervisor.tasks_inside import MOST_FAILURES, SOUND_S, TasksInside
from tests.support.trials import wait_until


def tasks_of(
    paths: RunPaths,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    *,
    hosts: int,
    each: int,
    clock: Callable[[], float] = time.monotonic,
) -> TasksInside:
    monkeypatch.setattr(TasksInside, "_command", lambda *_: command)
    options = Namespace(launcher="direct", run=paths.run, submission=1, group="trainer")
    events = EventWriter(paths, "supervisor")
    return TasksInside(options, "7.0", events, hosts, each, clock=clock)


def started(paths: RunPaths) -> list[tuple[int, str]]:
    return [(one["task"], one["host"]) for one in read_all(paths) if one["kind"] == "task_started"]


def test_failed_task_is_restarted_a_limited_number_of_times(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure after a long run starts a new count. The items of the failed task do not wait for
    the next agent, because its attempt has already begun.
    """
    now = 0.0
    names = NameStore(paths.names)
    claim = json.dumps(documents.to_json(Identity("rollout", 0, 0, "n0", "7.0.0", "7", 1)))
    names.add(keys.attempt("rollout", 0, 0), claim)
    tasks = tasks_of(paths, monkeypatch, ["false"], hosts=1, each=1, clock=lambda: now)
    tasks.start(())
    wait_until("the last start", lambda: tasks.keep(()) or len(started(paths)) == MOST_FAILURES)
    now = SOUND_S
    wait_until("the task to be given up", lambda: tasks.keep(()) or tasks.spent)
    tasks.keep(())
    tasks.start(())
    assert len(started(paths)) == 2 * MOST_FAILURES - 1
    assert [one.name for one in paths.rollouts.iterdir()] == ["rollout.0.1"]


def test_retired_task_is_not_restarted_before_the_next_round(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = tasks_of(paths, monkeypatch, ["true"], hosts=1, each=1)
    tasks.start(())
    tasks.end()
    tasks.keep(())
    assert len(started(paths)) == 1
    tasks.start(())
    assert len(started(paths)) == 2
    tasks.end()


def test_replaced_hosts_give_tasks_distinct_gpus(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tasks of a lost host move to GPUs without tasks. Other tasks keep their GPUs."""
    tasks = tasks_of(paths, monkeypatch, ["sleep", "600"], hosts=2, each=2)
    tasks.start(("n0", "n1"))
    first = started(paths)
    assert {task % 2: 0 for task, _ in first} == {0: 0, 1: 0}
    assert sorted((host, task % 2) for task, host in first) == [
        ("n0", 0), ("n0", 1), ("n1", 0), ("n1", 1),
    ]  # fmt: skip
    gone = [number for number, host in first if host == "n0"]
    tasks.start(("n1", "n2"))
    assert started(paths) == first, "what runs is left where it is"
    for task in tasks._tasks:
        if task.number in gone and task.child is not None:
            task.child.kill()
            task.child.wait()
    tasks.keep(("n1", "n2"))
    assert sorted(started(paths)[4:]) == [(number, "n2") for number in gone]
    for name in ("RETIRE_S", "END_S"):
        monkeypatch.setattr(tasks_inside, name, 0.0)
    tasks.end()


def test_job_end_waits_for_retiring_tasks(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import signal; signal.sigwait([signal.SIGUSR2])"  # blocked since before its start
    tasks = tasks_of(paths, monkeypatch, [sys.executable, "-c", code], hosts=1, each=1)
    tasks.start(())
    tasks.end()
    assert tasks._tasks[0].child is not None
    assert tasks._tasks[0].child.returncode == 0


@pytest.mark.parametrize(("task", "gpu"), [(None, ["0"]), (0, ["1,2"]), (3, ["3,4"])])
def test_task_gpus_come_after_the_trainers_gpus(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, task: int | None, gpu: list[str]
) -> None:
    plan = Plan.read(run.plan)
    (trainers,) = plan.groups
    one = trainers.model_copy(update={"workers_per_host": 1, "gpus_per_worker": 1})
    tasks = {"name": "rollout", "elastic": True, "hosts": 4, "gpus_per_worker": 2}
    beside = {"hosts": 2, "tasks_per_host": 2, "slots_per_task": 2}
    groups = (one.model_copy(update=beside), one.model_copy(update=tasks))
    run.plan.write_text(plan.model_copy(update={"groups": groups}).to_json())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    host = Host(run, 1, "trainer" if task is None else "rollout", task)
    assert host.identity.task == (task or 0)
    assert host.devices() == gpu
    host.close()
