"""Tests of the writes of an agent to the master, and of the notifications after each write."""

from __future__ import annotations

import select
from pathlib import Path
from typing import Any

import pytest

from slurmrl.errors import EnvironmentFailure
from slurmrl.run.channel.message_log import LogReader, LogWriter
from slurmrl.run.channel.wakeups import WakeupSocket
from slurmrl.workers.agent.incarnation import HOLD_S, Answers, Replies
from slurmrl.workers.messages import AGENT_LOG, Done, FromAgent, Ready, Saved

LOOPBACK = "127.0.0.1"
ARRIVAL_S = 30.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def done(rank: int, seq: int) -> Done:
    return Done(rank=rank, seq=seq, seconds=0.0)


def saved(rank: int, seq: int) -> Saved:
    return Saved(rank=rank, seq=seq)


def ready(rank: int) -> Ready:
    return Ready(rank=rank, size=1, fingerprint="f")


def said(reader: LogReader) -> list[FromAgent]:
    return [AGENT_LOG.from_json(values) for values in reader.read()]


def test_answers_of_a_fast_worker_wait_for_the_others() -> None:
    answers = Answers(2, Clock())
    assert answers.take([done(0, 0), done(0, 1), done(0, 2)]) == []
    assert answers.take([done(1, 0)]) == [done(0, 0), done(0, 1), done(0, 2), done(1, 0)]
    assert answers.take([done(1, 1)]) == [done(1, 1)]
    assert answers.take([done(1, 2)]) == [done(1, 2)]


def test_answers_of_different_kinds_are_collected_separately() -> None:
    """`Done` of one worker and `Saved` of the other are not both answers of either kind."""
    answers = Answers(2, Clock())
    assert answers.take([ready(0)]) == []
    assert answers.take([ready(1)]) == [ready(0), ready(1)]
    assert answers.take([done(0, 7)]) == []
    assert answers.take([saved(1, 7)]) == []
    assert len(answers.take([done(1, 7)])) == 3
    assert answers.take([saved(0, 7)]) == [saved(0, 7)]


def test_answers_are_held_for_a_limited_time() -> None:
    """The master then learns which rank is missing. Later answers are sent with the last one."""
    clock = Clock()
    answers = Answers(3, clock)
    assert answers.take([done(0, 0)]) == []
    clock.now = HOLD_S / 2
    assert answers.take([done(1, 0)]) == []
    assert answers.wait_s() == HOLD_S / 2
    clock.now = HOLD_S
    assert answers.wait_s() == 0.0
    assert answers.take([]) == [done(0, 0), done(1, 0)]
    assert answers.wait_s() == float("inf")
    assert answers.take([done(2, 0)]) == [done(2, 0)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent"


def test_master_is_notified_exactly_after_each_write(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wake-up before its message, or without a message, would cause a useless read."""
    master, replies = WakeupSocket(LOOPBACK), Replies(LogWriter(path), 1, WakeupSocket(LOOPBACK))
    assert replies.socket is not None
    reader = LogReader(path)

    def announced() -> bool:
        return bool(master.receive().sources)

    replies.send(done(0, 0))
    assert (said(reader), announced()) == ([done(0, 0)], False)  # the address is not known yet
    replies.wake_at(master.address)
    replies.send()
    assert not announced()
    append = LogWriter.append

    def fail(*arguments: Any) -> None:
        append(*arguments)
        raise EnvironmentFailure("no answer")

    monkeypatch.setattr(LogWriter, "append", fail)
    replies.send(done(0, 1))
    assert not announced()
    monkeypatch.setattr(LogWriter, "append", append)
    replies.send()
    assert select.select([master], [], [], ARRIVAL_S)[0]
    assert (said(reader), master.receive().sources) == (
        [done(0, 1)],
        {replies.socket.address.source},
    )
    replies.close()
    master.close()
