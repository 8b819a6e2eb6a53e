from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmrl.errors import CorruptFileError
from slurmrl.fsio.calls import SystemCalls, is_local
from slurmrl.run.channel import follower as module
from slurmrl.run.channel.follower import FIRST_POLL_S, SAFETY_S, Follower
from slurmrl.run.channel.message_log import LogReader, LogWriter, encode, segment_path
from slurmrl.run.channel.wakeups import WakeupSocket

LONGEST_S = 5.0


class Clock:
    """A clock that only the test advances."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def told(tmp_path: Path) -> None:
    """Return a log on a file system whose kernel reports changes."""
    if not is_local(tmp_path):
        pytest.skip(f"{tmp_path} is not on a file system that is known to be local")


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a log on a file system like a shared one."""
    monkeypatch.setattr(module, "is_local", lambda directory: False)


def follow(
    *paths: Path,
    calls: SystemCalls | None = None,
    clock: Callable[[], float] = time.monotonic,
    wakeups: WakeupSocket | None = None,
) -> Follower:
    readers = [LogReader(path, calls=calls or SystemCalls()) for path in paths]
    return Follower(
        readers, paths[0].parent, longest_poll_s=LONGEST_S, wakeups=wakeups, clock=clock
    )


def readable(follower: Follower) -> bool:
    return bool(select.select([follower.fileno()], [], [], 0)[0])


def test_unknown_file_systems_do_not_count_as_local(tmp_path: Path) -> None:
    assert not is_local(Path("/proc"))
    assert not is_local(tmp_path / "gone")


@pytest.mark.usefixtures("told")
def test_write_wakes_the_follower(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "a")
    LogWriter(tmp_path / "b")
    follower = follow(tmp_path / "a", tmp_path / "b", clock=Clock())
    assert follower.read() == []
    assert (readable(follower), follower.pause_s()) == (False, SAFETY_S)
    writer.append({"n": 0})
    assert readable(follower)
    follower.drain()
    assert not readable(follower)
    assert follower.read() == [{"n": 0}]
    follower.close()


@pytest.mark.usefixtures("told")
def test_write_between_read_and_wait_ends_the_wait(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "a")
    follower = follow(tmp_path / "a")
    seen: list[int] = []

    def write() -> None:
        for number in range(300):
            writer.append({"n": number})

    thread = threading.Thread(target=write)
    thread.start()
    deadline = time.monotonic() + 60
    while len(seen) < 300 and time.monotonic() < deadline:
        seen += [message["n"] for message in follower.read()]
        if len(seen) < 300:
            follower.wait()
    thread.join()
    assert seen == list(range(300))


@pytest.mark.usefixtures("told")
def test_missing_log_is_polled_until_it_exists(tmp_path: Path) -> None:
    follower = follow(tmp_path / "a", clock=Clock())
    assert follower.read() == []
    assert follower.pause_s() <= FIRST_POLL_S
    LogWriter(tmp_path / "a")
    assert follower.read() == []
    assert follower.pause_s() == SAFETY_S


@pytest.mark.usefixtures("told")
def test_next_segment_is_followed_at_once(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "a", segment_bytes=200)
    follower = follow(tmp_path / "a", clock=Clock())
    numbers: list[int] = []
    for number in range(40):
        writer.append({"n": number, "long": "x" * 50})
        numbers += [message["n"] for message in follower.read()]
        while follower.pause_s() == 0.0:
            numbers += [message["n"] for message in follower.read()]
        assert follower.pause_s() == SAFETY_S
    assert numbers == list(range(40))
    assert segment_path(tmp_path / "a", 5).exists()


class Failing(SystemCalls):
    broken: Path | None = None

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        if path == self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().open(path, flags, mode)


def test_unreachable_log_does_not_hide_other_logs(tmp_path: Path) -> None:
    calls = Failing()
    writers = [LogWriter(tmp_path / name) for name in "ab"]
    follower = follow(tmp_path / "a", tmp_path / "b", calls=calls)
    calls.broken = tmp_path / "b"
    for number, writer in enumerate(writers):
        writer.append({"n": number})
    assert follower.read() == [{"n": 0}]
    assert not follower.answers
    assert follower.pause_s() < SAFETY_S
    calls.broken = None
    assert follower.read() == [{"n": 1}]
    assert follower.answers


def test_hostile_bytes_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(encode({"$log": {"next": 7}}))
    with pytest.raises(CorruptFileError, match="not a valid internal frame"):
        follow(tmp_path / "a").read()


@pytest.mark.usefixtures("shared")
def test_wait_without_notifications_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    follower = follow(tmp_path / "a", clock=Clock())
    assert follower.read_due() == []
    follower.wait()
    follower.close()
    assert slept == [follower.pause_s()]
