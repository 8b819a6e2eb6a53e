"""Lost agents: those that sent messages, and those that only claimed their task."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slurmrl.errors import EnvironmentFailure, NameNotFoundError, ReportedError
from slurmrl.fsio import documents
from slurmrl.name_resolve.store import NameStore
from slurmrl.plan.model import Plan
from slurmrl.run import keys
from slurmrl.run.reports import Identity
from slurmrl.workers.master.worker_channel import AgentRegistry

JOB = "41.0.0"


class Names(NameStore):
    stalled = False

    def find_subtree(self, root: str) -> list[str]:
        if self.stalled:
            raise EnvironmentFailure("the server is away")
        return super().find_subtree(root)


def agent(task: int, host: str = "") -> Identity:
    return Identity("trainer", task, 0, host or f"n{task}", JOB, "41")


class Bed:
    def __init__(self, plan: Plan, folder: Path) -> None:
        self.now = 0.0
        self.names = Names(folder)
        self.heard: dict[str, Identity] = {}
        self.registry = AgentRegistry(
            self.names,
            plan,
            self.heard,
            incarnation=5,
            job=JOB,
            look_s=15.0,
            clock=lambda: self.now,
        )

    def claim(self, task: int, attempt: int, *, job: str = JOB, host: str = "") -> None:
        identity = replace(agent(task, host), attempt=attempt, job=job)
        value = json.dumps(documents.to_json(identity))
        self.names.add(keys.attempt("trainer", task, attempt), value)

    def look(self, seconds: float = 15.0) -> list[str]:
        self.now += seconds
        self.registry.look()
        return sorted(self.registry)


@pytest.fixture
def bed(plans: Callable[..., Plan], tmp_path: Path) -> Bed:
    return Bed(plans(hosts=12), tmp_path)


def test_claims_of_silent_agents_are_searched_after_a_delay(bed: Bed) -> None:
    bed.claim(1, 0)
    bed.claim(11, 0)
    bed.heard["trainer/1"] = agent(1, "heard")
    assert bed.look(14.0) == ["trainer/1"]
    assert bed.look(1.0) == ["trainer/1", "trainer/11"]
    assert bed.registry["trainer/1"].host == "heard"
    assert bed.registry["trainer/11"].attempt == 0
    bed.claim(2, 0)
    assert bed.look() == ["trainer/1", "trainer/11", "trainer/2"]


def test_registry_uses_only_the_newest_claim_of_its_job(bed: Bed) -> None:
    for attempt in range(11):
        bed.claim(1, attempt, job="40.0.0" if attempt < 10 else JOB)
    bed.claim(2, 0, job="41.0.0x")
    assert bed.look() == ["trainer/1"]
    assert bed.registry["trainer/1"].attempt == 10


def test_unreachable_directory_loses_no_agent(bed: Bed) -> None:
    bed.claim(1, 0)
    bed.names.stalled = True
    assert bed.look() == []
    bed.names.stalled = False
    assert bed.look() == ["trainer/1"]


def test_lost_host_ends_the_incarnation_and_is_named(bed: Bed) -> None:
    bed.claim(1, 0)
    bed.look()
    with pytest.raises(ReportedError, match="host n1 is lost") as caught:
        bed.registry.report_lost(["trainer/0", "trainer/1"])
    assert (caught.value.failure.cause, caught.value.failure.host) == ("lost_host", "n1")
    assert json.loads(bed.names.get(keys.lost("n1"))) == {"incarnation": 5, "job": JOB}
    with pytest.raises(NameNotFoundError):
        bed.names.get(keys.lost("n0"))


def test_hanging_agent_on_the_masters_host_is_no_host_loss(bed: Bed) -> None:
    """The host itself works, so the next round may use it."""
    bed.claim(0, 0)
    bed.look()
    with pytest.raises(ReportedError, match="agent trainer/0 hangs: it no longer") as caught:
        bed.registry.report_lost(["trainer/0"])
    assert (caught.value.failure.cause, caught.value.failure.agent) == ("hung", "trainer/0")
    with pytest.raises(NameNotFoundError):
        bed.names.get(keys.lost("n0"))


def test_record_of_a_host_lost_again_is_updated(bed: Bed) -> None:
    bed.names.add(keys.lost("n1"), json.dumps({"incarnation": 1, "job": "40.0.0"}))
    bed.claim(1, 0)
    bed.look()
    with pytest.raises(ReportedError):
        bed.registry.report_lost(["trainer/1"])
    assert json.loads(bed.names.get(keys.lost("n1")))["job"] == JOB


def test_only_trainer_agents_end_an_incarnation(plans: Callable[..., Plan], tmp_path: Path) -> None:
    """An expired lease of a rollout task, even of task 0, is not a lost host of the trainers. The
    registry does not read the claims of its group.
    """
    bed = Bed(plans(hosts=1, tasks=2), tmp_path)
    for task in range(2):
        away = Identity("rollout", task, 0, f"r{task}", JOB, "41")
        bed.names.add(keys.attempt("rollout", task, 0), json.dumps(documents.to_json(away)))
        bed.heard[away.label] = away
    bed.claim(0, 0)
    assert bed.look() == ["rollout/0", "rollout/1", "trainer/0"]
    bed.registry.report_lost(["rollout/0", "rollout/1"])
    with pytest.raises(ReportedError, match="agent trainer/0 hangs"):
        bed.registry.report_lost(["rollout/0", "trainer/0"])
