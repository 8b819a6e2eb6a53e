from __future__ import annotations

import itertools

import pytest

from slurmrl.errors import EnvironmentFailure, StaleIncarnationError
from slurmrl.workers.agent.loss_detection import LeaseGuard

BEAT_S, CHECK_S, TTL_S = 2.0, 6.0, 60.0


class Host:
    """A holder of a lease, with a directory and a clock that the test controls."""

    def __init__(self) -> None:
        self.now = 100.0
        self.fails = False
        self.reading_fails = False
        self.superseded = False
        self.beats: list[float] = []
        self.checks: list[float] = []
        self.lease_guard = LeaseGuard(
            self.beat,
            self.check,
            beat_s=BEAT_S,
            check_s=CHECK_S,
            ttl_s=TTL_S,
            clock=lambda: self.now,
        )

    def beat(self) -> None:
        if self.fails:
            raise EnvironmentFailure("broken")
        self.beats.append(self.now)

    def check(self) -> None:
        if self.fails or self.reading_fails:
            raise EnvironmentFailure("broken")
        self.checks.append(self.now)
        if self.superseded:
            raise StaleIncarnationError("a newer one")

    def turn(self, seconds: float = 0.5) -> bool:
        self.now += seconds
        self.lease_guard.turn()
        return self.lease_guard.may_start()


@pytest.fixture
def host() -> Host:
    return Host()


def test_start_waits_for_first_heartbeat_and_fence_check(host: Host) -> None:
    assert not host.lease_guard.may_start()
    assert host.turn(0.0)
    assert (host.beats, host.checks) == ([100.0], [100.0])


def test_heartbeats_and_fence_checks_follow_their_intervals(host: Host) -> None:
    assert all(host.turn() for _ in range(121))
    assert {later - earlier for earlier, later in itertools.pairwise(host.beats)} == {BEAT_S}
    assert len(host.beats) == 31
    assert len(host.checks) == 11


def test_host_is_fenced_until_heartbeat_and_fence_check_succeed(host: Host) -> None:
    host.turn()
    host.fails = True
    assert not host.turn(BEAT_S)
    assert not host.turn(3600.0)
    host.fails = False
    host.reading_fails = True
    assert not host.turn(BEAT_S)
    host.reading_fails = False
    looks = len(host.checks)
    assert host.turn()
    assert len(host.checks) == looks + 1


def test_suspended_host_checks_the_fence_before_it_continues(host: Host) -> None:
    host.turn()
    host.now += TTL_S
    assert not host.lease_guard.may_start()
    host.superseded = True
    with pytest.raises(StaleIncarnationError):
        host.turn(0.0)
    assert not host.lease_guard.may_start()


def test_expired_lease_needs_a_fence_check_despite_heartbeats(host: Host) -> None:
    host.turn()
    host.reading_fails = True
    assert not host.turn(TTL_S)
    assert not host.turn(BEAT_S)
    host.reading_fails = False
    assert host.turn()


def test_unreadable_history_does_not_fence_a_host(host: Host) -> None:
    host.turn()
    host.reading_fails = True
    assert all(host.turn() for _ in range(1000))


def test_holder_ends_once_a_newer_incarnation_is_readable(host: Host) -> None:
    host.turn()
    host.fails = host.superseded = True
    for _ in range(1000):
        assert not host.turn(BEAT_S)
    host.fails = False
    with pytest.raises(StaleIncarnationError):
        host.turn(BEAT_S)
