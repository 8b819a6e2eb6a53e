"""Tests of the messages of the master about the run."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio.calls import SystemCalls
from slurmrl.name_resolve.store import NameStore
from slurmrl.run import keys
from slurmrl.run.channel import message_log
from slurmrl.run.lease import Lease
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Identity
from slurmrl.watch import published
from slurmrl.workers.master import publish
from slurmrl.workers.master.publish import StatusPublisher


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1.7e9 + self.now


class CountingStore(NameStore):
    """A store that counts writes and can stop answering."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.writes = 0
        self.stalled = False

    def add(self, name: str, value: object, **more: Any) -> None:
        if self.stalled:
            raise EnvironmentFailure("the server is away")
        self.writes += 1
        super().add(name, value, **more)

    def said(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get(keys.status()))
        return found


class Desk:
    def __init__(self, paths: RunPaths, clock: Clock, names: NameStore | None = None) -> None:
        self.clock = clock
        self.names = CountingStore(paths.names)
        self.agents: dict[str, Identity] = {}
        self.publisher = StatusPublisher(
            names or self.names,
            paths,
            self.agents,
            incarnation=2,
            total_steps=60,
            lease_ttl_s=60.0,
            interval_s=2.0,
        )


@pytest.fixture
def desk(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> Desk:
    clock = Clock()
    monkeypatch.setattr(publish, "time", clock)
    return Desk(paths, clock)


def test_waiting_status_is_published_until_the_next_update(desk: Desk) -> None:
    waiting = {"for": [3], "what": "to finish gen of step 4", "since_s": 2.0}
    desk.publisher.tick(lambda: waiting)
    assert desk.names.said()["waiting"] == waiting
    desk.publisher.tick(lambda: pytest.fail("asked for although nothing is said"))
    desk.publisher.update(step=4)
    assert desk.names.said()["waiting"] is None


def test_unreachable_directory_does_not_end_the_incarnation(desk: Desk) -> None:
    desk.names.stalled = True
    desk.publisher.update(step=9)
    desk.names.stalled = False
    desk.clock.now += 2.0
    desk.publisher.tick()
    assert desk.names.said()["step"] == 9


def test_rank_activity_is_read_from_lease_notes(desk: Desk, paths: RunPaths) -> None:
    """Only activities of this incarnation are read, and partial notes are ignored."""
    lease = Lease(paths.lease("trainer", 0, 1))
    desk.agents["trainer/0"] = Identity("trainer", 0, 1, "n0", "41.0.0", "41_2")
    doing = {"call": "gen", "since_s": 3.0, "silent_s": 0.0, "collective": None}
    rows = [{"rank": rank, **doing} for rank in range(8)]
    found = []
    for incarnation, cut in ((2, 0), (1, 0), (2, 10)):
        note = message_log.encode({"incarnation": incarnation, "doing": rows})
        lease.beat(note[: len(note) - cut] + b"\0" * cut)
        desk.clock.now += 2.0
        desk.publisher.tick()
        found.append([group["ranks"] for group in desk.names.said()["doing"]])
    assert found == [["0-7"], [], []]


def test_restarted_agent_is_a_new_agent(
    desk: Desk, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expired lease and the activities of the previous agent do not apply to it."""
    observe = partial(publish.LeaseObserver, clock=desk.clock.monotonic)
    monkeypatch.setattr(publish, "LeaseObserver", observe)
    agent = Identity("rollout", 0, 0, "r0", "50.0.0", "50_0")
    desk.agents["rollout/0"] = agent
    doing = {"call": "gen", "since_s": 3.0, "silent_s": 0.0, "collective": None}
    note = {"incarnation": 2, "doing": [{"rank": 0, "world": "rollout/0", **doing}]}
    Lease(paths.lease("rollout", 0, 0)).beat(message_log.encode(note))
    desk.publisher.tick()
    assert [one["world"] for one in desk.names.said()["doing"]] == ["rollout/0"]
    for _ in range(40):
        desk.clock.now += 2.0
        desk.publisher.tick()
    assert desk.publisher.dead() == ["rollout/0"]
    desk.agents["rollout/0"] = replace(agent, attempt=1)
    assert desk.publisher.dead() == []
    Lease(paths.lease("rollout", 0, 1)).beat()
    desk.clock.now += 2.0
    desk.publisher.tick()
    said = desk.names.said()
    assert (said["doing"], said["tasks"]["rollout/0"]["attempt"]) == ([], 1)
    assert desk.publisher.dead() == []
    del desk.agents["rollout/0"]
    desk.clock.now += 2.0
    desk.publisher.tick()
    assert desk.names.said()["tasks"] == {}


class Syncs(SystemCalls):
    count = 0

    def fsync(self, descriptor: int) -> None:
        self.count += 1

    def fsync_directory(self, directory: Path) -> None:
        self.count += 1


def test_status_writes_do_not_delay_a_step(paths: RunPaths) -> None:
    """After a crash of the file server, the next status replaces an incomplete one."""
    calls = Syncs()
    names = NameStore(paths.names, calls=calls)
    desk = Desk(paths, Clock(), names)
    desk.publisher.update(step=1)
    assert (calls.count, published.status(names)["step"]) == (0, 1)
    for content in (b"", b"\0" * 100):
        (file,) = paths.names.iterdir()
        file.write_bytes(content)
        assert published.status(names) == {}
        desk.publisher.update(step=2)
        assert published.status(names)["step"] == 2
