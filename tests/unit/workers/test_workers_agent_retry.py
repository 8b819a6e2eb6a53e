"""An agent on a directory that does not answer: it keeps trying and loses no message."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmrl import backoff
from slurmrl.errors import EnvironmentFailure, OwnershipError, WaitTimeoutError
from slurmrl.fsio.calls import SystemCalls
from slurmrl.run.channel.message_log import LogReader, LogWriter
from slurmrl.run.paths import RunPaths
from slurmrl.workers.agent.agent_host import Host
from slurmrl.workers.agent.incarnation import Incarnation, Replies
from slurmrl.workers.messages import Saved


class Broken(SystemCalls):
    fails = False

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().open(path, flags, mode)


@pytest.fixture
def incarnation(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> Iterator[Incarnation]:
    monkeypatch.setattr(backoff, "OUTAGE_S", (0.001, 0.002))
    host = Host(run, 1, "trainer")
    yield Incarnation(host, 0)
    host.children.close()


def fails_at_first(times: int, value: object) -> list[object]:
    return [*[EnvironmentFailure("broken")] * times, value]


def answer(script: list[object]) -> object:
    found = script.pop(0)
    if isinstance(found, Exception):
        raise found
    return found


def test_ownership_error_is_not_retried(incarnation: Incarnation) -> None:
    script: list[object] = [OwnershipError("theirs"), "done"]
    with pytest.raises(OwnershipError):
        incarnation.retry("do it", lambda: answer(script))


def test_time_without_directory_does_not_count_as_waiting(incarnation: Incarnation) -> None:
    script = fails_at_first(20, "done")
    assert incarnation.wait("it", lambda: answer(script), timeout_s=0.0) == "done"
    with pytest.raises(WaitTimeoutError, match="waited 0 s for it"):
        incarnation.wait("it", lambda: None, timeout_s=0.0)


def test_messages_wait_for_the_directory_and_keep_their_order(
    incarnation: Incarnation, run: RunPaths
) -> None:
    calls = Broken()
    incarnation.replies = Replies(LogWriter(run.agent_log(1, "trainer", 0), calls=calls), 1)
    reader = LogReader(run.agent_log(1, "trainer", 0))
    incarnation.send(Saved(rank=0, seq=0))
    calls.fails = True
    incarnation.send(Saved(rank=1, seq=0))
    incarnation.turn(0.0)
    incarnation.send(Saved(rank=2, seq=0))
    calls.fails = False
    assert [message["rank"] for message in reader.read()] == [0]
    incarnation.turn(0.0)
    assert [message["rank"] for message in reader.read()] == [1, 2]
    size = run.agent_log(1, "trainer", 0).stat().st_size
    incarnation.turn(0.0)
    assert run.agent_log(1, "trainer", 0).stat().st_size == size
