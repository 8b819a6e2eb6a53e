"""Tests with clocks that are wrong or jump, and with processes that are suspended for longer than
any TTL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurmrl.errors import StaleIncarnationError
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import begin, fold
from slurmrl.run.lease import Lease, LeaseObserver
from tests.support.faulty import Clock

TTL_S = 60.0
HOUR_S = 3600.0


def test_clock_differences_of_hours_do_not_change_the_order(tmp_path: Path) -> None:
    """Records contain times, but only slots determine the order."""
    ahead = History(tmp_path, clock=lambda: time.time() + 5 * HOUR_S)
    behind = History(tmp_path, clock=lambda: 0.0)
    old = begin(ahead, {})
    old.append(Kind.COMMIT, {"step": 1, "directory": "step-1"})
    new = begin(behind, {})
    with pytest.raises(StaleIncarnationError):
        old.append(Kind.COMMIT, {"step": 2, "directory": "step-2"})
    new.append(Kind.COMMIT, {"step": 2, "directory": "step-2"})
    state = fold(ahead.read())
    assert (state.incarnation, [commit.step for commit in state.commits]) == (2, [1, 2])


def test_file_times_of_another_machine_are_ignored(tmp_path: Path) -> None:
    path, clock = tmp_path / "lease", Clock()
    lease, watching = Lease(path), LeaseObserver(path, TTL_S, clock)
    for number in range(100):
        lease.beat()
        os.utime(path, (number, -number * HOUR_S))
        clock.advance(10)
        assert watching.observe().alive


@pytest.mark.parametrize("jump_s", [2 * TTL_S, HOUR_S, 1000 * HOUR_S])
def test_suspended_observer_declares_no_holder_dead(tmp_path: Path, jump_s: float) -> None:
    """The observer's clock jumps between two checks. At most a quarter of the TTL counts."""
    clock = Clock()
    leases = [Lease(tmp_path / str(number)) for number in range(10)]
    watching = [LeaseObserver(tmp_path / str(number), TTL_S, clock) for number in range(10)]
    for _ in range(5):
        for lease in leases:
            lease.beat()
        assert all(one.observe().alive for one in watching)
        clock.advance(jump_s)
        assert all(one.observe().alive for one in watching)


@pytest.mark.parametrize("step_s", [1.0, 15.0, 40.0, HOUR_S])
def test_expired_lease_is_detected_at_any_polling_interval(tmp_path: Path, step_s: float) -> None:
    clock = Clock()
    lease, watching = Lease(tmp_path / "lease"), LeaseObserver(tmp_path / "lease", TTL_S, clock)
    lease.beat()
    looks = 0
    while watching.observe().alive:
        clock.advance(step_s)
        looks += 1
        assert looks <= TTL_S / min(step_s, TTL_S / 4) + 1
    assert looks >= 4


def test_resumed_holder_is_alive_again(tmp_path: Path) -> None:
    clock = Clock()
    lease, watching = Lease(tmp_path / "lease"), LeaseObserver(tmp_path / "lease", TTL_S, clock)
    lease.beat()
    watching.observe()
    for _ in range(10):
        clock.advance(15)
        watching.observe()
    assert not watching.observe().alive
    lease.beat()
    assert watching.observe().alive, "what to do about it is the history's to say"


PAUSED = """
import os, signal, sys
from pathlib import Path
from slurmrl.errors import StaleIncarnationError
from slurmrl.fsio.calls import SystemCalls
from slurmrl.run.history.slots import History
from slurmrl.run.history.slots import Kind
from slurmrl.run.history.state import begin

class Stops(SystemCalls):
    armed = False
    def __getattribute__(self, name):
        if name == sys.argv[2] and Stops.armed:
            Stops.armed = False
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().__getattribute__(name)

calls = Stops()
writer = begin(History(Path(sys.argv[1]), calls=calls), {"by": "old"})
Stops.armed = True
try:
    writer.append(Kind.COMMIT, {"step": 1, "directory": "step-1.1"})
except StaleIncarnationError:
    sys.exit(7)
"""


@pytest.mark.parametrize("operation", ["listdir", "open", "pwrite", "fsync", "close", "link"])
def test_suspended_master_commits_nothing_after_a_newer_begin(
    tmp_path: Path, operation: str
) -> None:
    """A real process stops at an operation of its commit. A successor begins, and the process
    continues.
    """
    history = tmp_path / "history"
    history.mkdir()
    command = [sys.executable, "-c", PAUSED, str(history), operation]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        successor = begin(History(history), {"by": "new"})
        successor.append(Kind.COMMIT, {"step": 1, "directory": "step-1.2"})
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(120) == 7
    finally:
        process.kill()
        process.wait()
    state = fold(History(history).read())
    assert state.incarnation == 2
    assert [commit.directory for commit in state.commits] == ["step-1.2"]
