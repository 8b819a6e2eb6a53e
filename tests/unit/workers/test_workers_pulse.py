"""Heartbeats are sent as long as there is a reader. Missing heartbeats are noticed, unless the
listener itself was suspended.
"""

from __future__ import annotations

import pytest

from slurmrl.run.channel.pipe import Connection
from slurmrl.workers import child_process
from slurmrl.workers.child_process import SilenceWatch

SILENCE_S = 60.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> SilenceWatch[int]:
    found: SilenceWatch[int] = SilenceWatch(SILENCE_S, clock)
    found.heard(3)
    return found


def pass_time(
    watch: SilenceWatch[int], clock: Clock, seconds: float, step_s: float = 1.0
) -> list[int]:
    silent = watch.silent()
    end = clock.now + seconds
    while clock.now < end:
        clock.now += step_s
        silent = watch.silent()
    return silent


def test_missing_heartbeats_are_detected_after_the_timeout(
    watch: SilenceWatch[int], clock: Clock
) -> None:
    assert pass_time(watch, clock, SILENCE_S - 1) == []
    assert pass_time(watch, clock, 1) == [3]


def test_heartbeat_restarts_the_timeout(watch: SilenceWatch[int], clock: Clock) -> None:
    for _ in range(100):
        assert pass_time(watch, clock, SILENCE_S / 2) == []
        watch.heard(3)


def test_process_without_a_first_heartbeat_is_not_watched(
    watch: SilenceWatch[int], clock: Clock
) -> None:
    """Imports may take long, and the master limits the time of a start."""
    watch.forget(3)
    assert pass_time(watch, clock, 3600) == []
    watch.heard(4)
    assert pass_time(watch, clock, SILENCE_S) == [4]


def test_time_while_the_listener_was_suspended_is_not_counted(
    watch: SilenceWatch[int], clock: Clock
) -> None:
    """The watcher and the other processes were stopped for an hour. The others get time to send a
    heartbeat.
    """
    clock.now += 3600
    assert watch.silent() == []
    assert pass_time(watch, clock, SILENCE_S / 2) == []
    assert pass_time(watch, clock, SILENCE_S / 2) == [3]


@pytest.mark.parametrize(
    ("heartbeat_s", "silence_s", "expected"),
    [(2.0, 60.0, 2.0), (2.0, 4.0, 1.0), (30.0, 60.0, 15.0)],
)
def test_heartbeat_interval_is_a_fraction_of_the_timeout(
    heartbeat_s: float, silence_s: float, expected: float
) -> None:
    assert child_process.pulse_interval_s(heartbeat_s, silence_s) == expected


def test_heartbeats_continue_during_messages() -> None:
    ours, theirs = Connection.pair()
    child_process.start_pulse(theirs, 0.01)
    for _ in range(3):
        assert ours.receive(60) == {"type": "pulse"}
    theirs.send({"type": "other"})
    said = [ours.receive(60) for _ in range(20)]
    assert {"type": "other"} in said
    ours.close()
    assert theirs.receive(60) is None  # the thread sees that, too, and ends
    theirs.close()


def test_heartbeats_do_not_fill_a_pipe_without_a_reader() -> None:
    ours, theirs = Connection.pair()
    theirs.send({"type": "large", "text": "x" * 5_000_000})
    child_process.start_pulse(theirs, 0.001)
    first = ours.receive(60)
    assert first is not None
    assert first["type"] == "large"
    assert ours.receive(60) == {"type": "pulse"}
    ours.close()
    assert theirs.receive(60) is None
    theirs.close()
