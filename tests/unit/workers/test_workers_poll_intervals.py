"""A simulated idle trial, with a count of all file operations of its processes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from slurmrl.fsio import atomic
from slurmrl.fsio.calls import SystemCalls
from slurmrl.name_resolve.store import NameStore
from slurmrl.run.channel.follower import Follower
from slurmrl.run.channel.message_log import LogReader, LogWriter
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import fold
from slurmrl.run.lease import Lease, LeaseObserver
from slurmrl.workers.agent.loss_detection import LeaseGuard
from slurmrl.workers.polling import PollIntervals

WARM_UP_S = 600.0
REST_S = 600.0
TTL_S = 60.0


class Counting(SystemCalls):
    """File operations that count every call except pauses."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if name != "sleep" and hasattr(SystemCalls, name) and not name.startswith("_"):
            self.count[name] += 1
        return found


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Agent:
    """The loop of an agent that waits for the master."""

    def __init__(
        self, folder: Path, task: int, intervals: PollIntervals, clock: Clock, calls: Counting
    ) -> None:
        history = History(folder / "history", calls=calls)
        self.clock = clock
        self.lease_guard = LeaseGuard(
            Lease(folder / f"lease.{task}", calls=calls).beat,
            lambda: fold(history.read()),
            beat_s=intervals.beat_s,
            check_s=intervals.check_s,
            ttl_s=TTL_S,
            clock=clock,
        )
        self.beat_s = intervals.beat_s
        reader = LogReader(folder / "master", calls=calls)
        self.master = Follower([reader], folder, longest_poll_s=intervals.poll_s)
        self.next_read = 0.0

    def turn(self) -> float:
        if self.clock() >= self.next_read:
            assert self.master.read() == []
            self.next_read = self.clock() + self.master.pause_s()
        self.lease_guard.turn()
        return min(self.next_read - self.clock(), self.beat_s)


class Master:
    """The loop of a master that waits for the ranks."""

    def __init__(
        self, folder: Path, hosts: int, intervals: PollIntervals, clock: Clock, calls: Counting
    ) -> None:
        self.clock = clock
        self.status_s = intervals.status_s
        self.next_status = 0.0
        self.own = Counting()
        """Operations that do not grow with the hosts."""
        self.names = NameStore(folder, calls=self.own)
        self.observers = [
            LeaseObserver(folder / f"lease.{task}", TTL_S, clock, calls=calls)
            for task in range(hosts)
        ]
        readers = [LogReader(folder / f"agent.{task}", calls=calls) for task in range(hosts)]
        self.agents = Follower(readers, folder, longest_poll_s=intervals.poll_s)

    def turn(self) -> float:
        assert self.agents.read() == []
        if self.clock() >= self.next_status:
            self.next_status = self.clock() + self.status_s
            ages = [observer.observe().age_s for observer in self.observers]
            self.names.add("status", str(ages)[:100], replace=True)
        return self.agents.pause_s()


@pytest.mark.parametrize(("hosts", "simulated"), [(1, 1), (16, 4), (400, 4), (10_000, 2)])
def test_idle_trial_keeps_the_operation_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: int, simulated: int
) -> None:
    """The test runs ``simulated`` agents and the master's reads of their files, and scales both to
    the number of hosts.
    """
    monkeypatch.setattr("slurmrl.run.channel.follower.is_local", lambda directory: False)
    (tmp_path / "history").mkdir()
    History(tmp_path / "history").append(Kind.BEGIN, 1, {}, after=-1)
    for name in ("master", *(f"agent.{task}" for task in range(simulated))):
        LogWriter(tmp_path / name)
    calls, clock, intervals = Counting(), Clock(), PollIntervals.of(hosts, 2.0)
    processes: list[Agent | Master] = [
        Agent(tmp_path, task, intervals, clock, calls) for task in range(simulated)
    ]
    master = Master(tmp_path, simulated, intervals, clock, calls)
    processes.append(master)
    wakes = dict.fromkeys(processes, 0.0)
    counted = False
    while clock.now < WARM_UP_S + REST_S:
        process = min(wakes, key=lambda one: wakes[one])
        clock.now = wakes[process]
        if not counted and clock.now >= WARM_UP_S:
            calls.count.clear()
            master.own.count.clear()
            counted = True
        wakes[process] = clock.now + process.turn()
    of_hosts = sum(calls.count.values()) * hosts / simulated
    per_s = (of_hosts + sum(master.own.count.values())) / REST_S
    assert per_s <= max(200.0, 0.5 * hosts)
    assert per_s > 0.5 * max(200.0, 0.5 * hosts) or hosts == 1
    assert intervals.beat_s <= TTL_S / 4


@pytest.mark.parametrize("hosts", [1, 300, 10_000])
def test_busy_rollout_tasks_keep_their_operation_budget(hosts: int) -> None:
    intervals = PollIntervals.of(hosts, 2.0)
    assert 3 * hosts / intervals.results_s <= 450, "the master reads one log after the other"
    assert 3 * hosts / intervals.record_s <= 450, "it reads one after each record"
    for pause_s in (intervals.task_s, intervals.spread_s):
        assert 4 * hosts / pause_s <= max(1000, 2 * hosts)


def test_file_operations_equal_the_documented_counts(tmp_path: Path) -> None:
    """docs/protocols.md computes the load of a metadata server from these counts."""
    calls = Counting()
    lease = Lease(tmp_path / "lease", calls=calls)
    lease.beat()
    observer = LeaseObserver(tmp_path / "lease", TTL_S, calls=calls)
    store = NameStore(tmp_path, calls=calls)
    store.add("key", "1")
    history = History(tmp_path / "history", calls=calls)
    atomic.make_private_directory(tmp_path / "history")
    for slot in range(3):
        kind = Kind.COMMIT if slot else Kind.BEGIN
        data = {"step": slot, "directory": str(slot)}
        history.append(kind, 1, data, after=slot - 1)
    history.read()

    def count(action: object) -> int:
        calls.count.clear()
        assert callable(action)
        action()
        return sum(calls.count.values())

    assert count(lease.beat) == 3
    assert count(observer.observe) == 3
    assert count(lambda: store.get("key")) == 4
    assert count(lambda: store.add("other", "1")) == 8
    assert count(lambda: store.add("other", "2", replace=True)) == 7
    assert count(lambda: store.add("other", "3", replace=True, durable=False)) == 5
    assert calls.count["fsync"] == 0
    assert count(lambda: store.find_subtree("")) == 1
    assert count(history.read) == 2
