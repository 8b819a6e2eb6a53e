from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio.calls import SystemCalls
from slurmrl.run.lease import Lease, LeaseObserver, LeaseView, read_counter
from tests.support.replaced import replace

TTL_S = 60.0
POLL_S = 5.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Directory(SystemCalls):
    """A directory that can fail or answer late."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.fails = False
        self.hangs_s = 0.0

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        self.clock.now += self.hangs_s
        if self.fails:
            raise OSError(errno.EIO, "broken")
        return super().open(path, flags, mode)


class Watcher:
    """A holder, and an observer of it that looks every POLL_S seconds."""

    def __init__(self, path: Path) -> None:
        self.clock = Clock()
        self.directory = Directory(self.clock)
        self.lease = Lease(path)
        self.observer = LeaseObserver(path, TTL_S, self.clock, calls=self.directory)

    def look(self, seconds: float = POLL_S) -> LeaseView:
        self.clock.now += seconds
        return self.observer.observe()

    def look_for(self, seconds: float) -> LeaseView:
        for _ in range(int(seconds / POLL_S)):
            view = self.look()
        return view


@pytest.fixture
def watcher(tmp_path: Path) -> Watcher:
    watcher = Watcher(tmp_path / "lease")
    watcher.lease.beat()
    watcher.look()
    return watcher


def test_heartbeats_have_a_fixed_width_and_are_private(tmp_path: Path) -> None:
    path = tmp_path / "lease"
    before = os.umask(0o277)
    lease = Lease(path)
    lease.beat()
    os.umask(before)
    assert path.read_bytes() == b"00000000000000000001\n"
    for _ in range(11):
        lease.beat()
    assert path.read_bytes() == b"00000000000000000012\n"
    assert read_counter(path) == 12
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"0000", b"x" * 21, b"\xff" * 21, b"1" * 100])
def test_incomplete_or_hostile_heartbeat_has_no_counter(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lease").write_bytes(content)
    assert read_counter(tmp_path / "lease") is None


def test_missing_lease_and_missing_directory_differ(tmp_path: Path) -> None:
    assert read_counter(tmp_path / "lease") is None
    with pytest.raises(EnvironmentFailure):
        read_counter(tmp_path / "gone" / "lease")
    with pytest.raises(EnvironmentFailure):
        Lease(tmp_path / "gone" / "lease").beat()


def test_holder_with_an_advancing_counter_stays_alive(watcher: Watcher) -> None:
    for _ in range(100):
        watcher.lease.beat()
        assert watcher.look() == LeaseView(True, 0.0, read_counter(watcher.observer._path))


def test_silent_holder_is_dead_after_the_ttl(watcher: Watcher) -> None:
    almost = watcher.look_for(TTL_S - POLL_S)
    assert (almost.alive, almost.age_s) == (True, TTL_S - POLL_S)
    assert not watcher.look().alive


def test_holder_that_renews_again_is_alive_again(watcher: Watcher) -> None:
    assert not watcher.look_for(TTL_S).alive
    watcher.lease.beat()
    assert watcher.look() == LeaseView(True, 0.0, 2)


def test_holder_that_never_renewed_is_dead_after_the_ttl(tmp_path: Path) -> None:
    watcher = Watcher(tmp_path / "lease")
    assert watcher.look() == LeaseView(True, 0.0, None)
    assert watcher.look_for(TTL_S - POLL_S).alive
    assert not watcher.look().alive


def test_failing_directory_leaves_holders_alive(watcher: Watcher) -> None:
    watcher.directory.fails = True
    assert watcher.look_for(3600) == LeaseView(True, 0.0, 1)
    watcher.directory.fails = False
    assert watcher.look().age_s == 0.0
    assert not watcher.look_for(TTL_S).alive


def test_hanging_directory_leaves_holders_alive(watcher: Watcher) -> None:
    watcher.directory.hangs_s = 600.0
    view = watcher.look()
    assert (view.alive, view.age_s) == (True, POLL_S)


def test_deleted_directory_leaves_holders_alive(tmp_path: Path) -> None:
    folder = tmp_path / "leases"
    folder.mkdir()
    watcher = Watcher(folder / "lease")
    watcher.lease.beat()
    watcher.look()
    (folder / "lease").unlink()
    folder.rmdir()
    assert watcher.look_for(3600).alive


def test_suspended_observer_leaves_holders_alive(watcher: Watcher) -> None:
    view = watcher.look(seconds=3600.0)
    assert (view.alive, view.age_s) == (True, TTL_S / 4)
    assert watcher.look(seconds=3600.0).alive
    assert watcher.look(seconds=3600.0).alive
    assert not watcher.look(seconds=3600.0).alive


def test_lease_note_is_written_with_the_counter_and_never_hides_it(watcher: Watcher) -> None:
    """Covers a shorter note, after which the rest of the previous note remains."""
    watcher.lease.beat(b"a long note")
    assert (watcher.look().counter, watcher.look().note) == (2, b"a long note")
    watcher.lease.beat(b"short")
    view = watcher.look()
    assert (view.counter, view.note) == (3, b"shortg note")


@pytest.mark.parametrize("kind", ["folder", "fifo", "link"])
def test_lease_file_is_recreated_if_replaced_by_something_else(tmp_path: Path, kind: str) -> None:
    """Also covers a folder with content, and repeated replacement."""
    lease = Lease(tmp_path / "lease")
    lease.beat()
    for _ in range(2):
        replace(tmp_path / "lease", kind)
        if kind == "folder":
            (tmp_path / "lease" / "file").touch()
        with pytest.raises(EnvironmentFailure, match="cannot beat the lease"):
            lease.beat()
        before = LeaseObserver(tmp_path / "lease").observe().counter
        lease.beat(b"note")
        view = LeaseObserver(tmp_path / "lease").observe()
        assert (before, view.note) == (None, b"note")
