"""Requests for stacks are passed on once and in order. A check without a request reads one name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurmrl.errors import EnvironmentFailure, NameNotFoundError
from slurmrl.name_resolve.store import NameStore
from slurmrl.run import keys
from slurmrl.workers.master.worker_channel import StackRequests
from slurmrl.workers.messages import CollectStacks, Order


class Store(NameStore):
    looks = 0
    stalled = False

    def get(self, name: str) -> str:
        self.looks += 1
        if self.stalled:
            raise EnvironmentFailure("the server is away")
        return super().get(name)


class Desk:
    """The requests of incarnation 3, which are checked every 2 s."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.names = Store(folder)
        self.posted: list[Order] = []
        self.requests = StackRequests(
            self.names, 3, self.posted.append, look_s=2.0, clock=lambda: self.now
        )

    def ask(self, number: int, ranks: Any, incarnation: int = 3) -> None:
        value = json.dumps({"ranks": ranks})
        self.names.add(keys.stacks(incarnation, number), value)

    def pass_time(self, seconds: float) -> list[tuple[int, Any]]:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            self.requests.look()
        return [(one.number, one.ranks) for one in self.posted if isinstance(one, CollectStacks)]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_requests_are_forwarded_once_in_order(desk: Desk) -> None:
    desk.ask(1, None)
    desk.ask(2, [3])
    desk.ask(1, [7], incarnation=2)
    assert desk.pass_time(20) == [(1, None), (2, (3,))]
    desk.ask(3, [0])
    assert desk.pass_time(4)[2:] == [(3, (0,))]


def test_broken_requests_and_unreachable_directory_cause_no_delay(desk: Desk) -> None:
    desk.names.add(keys.stacks(3, 1), "no JSON")
    desk.ask(2, "all of them")
    desk.ask(3, None)
    desk.names.stalled = True
    assert desk.pass_time(6) == []
    desk.names.stalled = False
    assert desk.pass_time(8) == [(3, None)]
    with pytest.raises(NameNotFoundError):
        desk.names.get(keys.stacks(3, 4))
