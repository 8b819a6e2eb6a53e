"""The tasks of groups beside the trainers, as the master sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slurmrl.channel.log import LogWriter
from slurmrl.fsio import atomic
from slurmrl.monitor.events import EventWriter, read_all
from slurmrl.monitor.reports import Failure, Identity, Warned
from slurmrl.paths import RunPaths
from slurmrl.plan.model import Plan
from slurmrl.workers.master import task_worlds as module
from slurmrl.workers.master.task_worlds import TaskWorlds
from slurmrl.workers.messages import AGENT_LOG, Hello, Ready

INCARNATION = 3


class Bed:
    def __init__(self, paths: RunPaths, plan: Plan) -> None:
        self.paths, self.now = paths, 0.0
        events = EventWriter(paths, "master.3")
        self.worlds = TaskWorlds(
            paths, plan, INCARNATION, events, look_s=2.0, clock=lambda: self.now
        )

    def start(self, task: int, attempt: int, incarnation: int = INCARNATION) -> LogWriter:
        """An agent of the group says hello."""
        log = LogWriter(self.paths.agent_log(incarnation, "rollout", task, attempt))
        agent = Identity("rollout", task, attempt, f"r{task}", "50.0.0", "50_0", 1)
        log.append(AGENT_LOG.to_json(Hello(agent=agent)))
        return log

    def look(self, *dead: str) -> dict[str, int]:
        """The living attempts by world."""
        self.now += 2.0
        self.worlds.look(dead)
        return {world: agent.attempt for world, agent in self.worlds.agents.items()}

    def told(self, kind: str) -> list[tuple[str, str]]:
        events = [event for event in read_all(self.paths) if event["kind"] == kind]
        return [(event["world"], event.get("reason", "")) for event in events]


@pytest.fixture
def bed(paths: RunPaths, plans: Callable[..., Plan]) -> Bed:
    return Bed(paths, plans(tasks=2))


def ready(rank: int) -> dict[str, Any]:
    return AGENT_LOG.to_json(Ready(rank=rank, size=0, fingerprint=""))


def failed(reason: str) -> dict[str, Any]:
    return AGENT_LOG.to_json(Failure(cause="died", reason=reason, rank=0))


def test_a_world_is_ready_with_all_of_its_ranks(bed: Bed) -> None:
    log = bed.start(7, 0)
    log.append(ready(1))
    assert bed.look() == {"rollout/7": 0}
    assert bed.told("world_ready") == []
    log.append(ready(0))
    bed.look()
    assert bed.told("world_ready") == [("rollout/7", "")]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (failed("rank 0 of rollout/7 on r7 was ended by SIGKILL"), "rank 0 of rollout/7 on r7"),
        (AGENT_LOG.to_json(Warned(cause="preemption")), "its job will end (preemption)"),
        ({"type": "failed", "reason": 7}, "the log of an agent has 7 in 'reason'"),
        ({"type": "ready"}, "the log of an agent has no 'rank'"),
        ({"type": "unheard of"}, "the log of an agent has 'unheard of' in 'type'"),
    ],
)
def test_what_ends_a_world_is_an_event_and_nothing_else(
    bed: Bed, message: dict[str, Any], reason: str
) -> None:
    """Whatever its agent sends, damaged messages included, the master continues."""
    log = bed.start(7, 0)
    bed.start(8, 0)
    bed.look()
    log.append(message, failed("and again"))
    assert bed.look() == {"rollout/8": 0}
    bed.look()
    ((world, why),) = bed.told("world_ended")
    assert (world, reason in why) == ("rollout/7", True), why


def test_a_lost_agent_is_forgotten_and_its_successor_is_not(bed: Bed) -> None:
    bed.start(7, 0)
    bed.look()
    assert bed.look("rollout/7", "trainer/0") == {}
    assert bed.told("world_ended") == [("rollout/7", "its agent no longer renews its lease")]
    bed.start(7, 1)
    assert bed.look("rollout/7") == {"rollout/7": 1}, "the lease was that of the one before"


def test_a_task_that_was_started_again_has_one_world(bed: Bed) -> None:
    """Slurm requeued it before its lease expired; late news of the old one does not count."""
    log = bed.start(7, 0)
    bed.look()
    for attempt in (2, 10):
        bed.start(7, attempt)
    assert bed.look() == {"rollout/7": 10}
    log.append(failed("late"))
    assert bed.look() == {"rollout/7": 10}
    assert bed.told("world_ended") == [("rollout/7", "its task was started again")] * 2


def test_logs_of_other_incarnations_are_not_read(bed: Bed) -> None:
    bed.start(7, 0, INCARNATION - 1)
    assert bed.look() == {}


def test_without_other_groups_nothing_is_read(
    paths: RunPaths, plans: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial at rest costs no file operation more."""
    bed = Bed(paths, plans())
    monkeypatch.setattr(module.atomic, "list_names", pytest.fail)
    assert module.atomic is atomic
    assert bed.look() == {}
