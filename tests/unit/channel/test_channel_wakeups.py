"""Wake-ups: their effects, and attacks that have no effect."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmrl.errors import CorruptFileError
from slurmrl.fsio import documents
from slurmrl.fsio.calls import SystemCalls
from slurmrl.run.channel import wakeups as module
from slurmrl.run.channel.follower import ANNOUNCED_FIRST_POLL_S, FIRST_POLL_S, SPARE_LOOKS, Follower
from slurmrl.run.channel.message_log import LogReader, LogWriter
from slurmrl.run.channel.wakeups import TOKEN_BYTES, WakeupAddress, WakeupSocket

LOOPBACK = "127.0.0.1"
LONGEST_S = 30.0
ARRIVAL_S = 30.0
"""Deadline for a datagram on loopback."""


class Looks(SystemCalls):
    """Counts the reads of each log."""

    def __init__(self) -> None:
        self.at: dict[str, int] = {}

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        self.at[path.name] = self.at.get(path.name, 0) + 1
        return super().open(path, flags, mode)

    def take(self) -> dict[str, int]:
        taken, self.at = self.at, {}
        return taken


class Site:
    """A reader of three logs on a shared file system, whose writers send wake-ups."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.looks = Looks()
        self.wakeups = WakeupSocket(LOOPBACK)
        self.writers = {name: LogWriter(folder / name) for name in "abc"}
        self.sockets = {name: WakeupSocket(LOOPBACK) for name in "abc"}
        readers = [LogReader(folder / name, calls=self.looks) for name in "abc"]
        self.follower = Follower(
            readers, folder, longest_poll_s=LONGEST_S, wakeups=self.wakeups, clock=lambda: self.now
        )
        for place, wakeups in enumerate(self.sockets.values()):
            self.follower.listen_for(wakeups.address.source, place)
        assert self.follower.read_due() == []
        self.looks.take()

    def wake(self, name: str, address: WakeupAddress | None = None) -> None:
        self.sockets[name].wake([address or self.wakeups.address])
        self.arrived()

    def arrived(self) -> None:
        readable, _, _ = select.select([self.follower.fileno()], [], [], ARRIVAL_S)
        assert readable, "no datagram arrived"

    def send(self, name: str, number: int) -> None:
        """Let a writer append and send a wake-up, and read its log."""
        self.writers[name].append({"n": number})
        self.wake(name)
        assert self.follower.read_due() == [{"n": number}]
        self.looks.take()

    def poll(self) -> list[dict[str, int]]:
        """Advance the time to the next poll."""
        self.now += self.follower.pause_s()
        return self.follower.read_due()

    def close(self) -> None:
        for wakeups in (self.wakeups, *self.sockets.values()):
            wakeups.close()


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmrl.run.channel.follower.is_local", lambda directory: False)


@pytest.fixture
def site(tmp_path: Path, shared: None) -> Iterator[Site]:
    found = Site(tmp_path)
    yield found
    found.close()


def test_notification_costs_one_read_of_its_senders_log(site: Site) -> None:
    site.writers["b"].append({"n": 1})
    site.wake("b")
    site.follower.drain()
    assert site.follower.woken
    assert site.follower.read_due() == [{"n": 1}]
    assert not site.follower.woken
    assert site.follower.read_due() == []
    assert site.looks.take() == {"b": 1}


def test_only_a_valid_notification_ends_a_wait(site: Site) -> None:
    site.now += 1000.0
    site.follower.read()
    stranger = WakeupSocket(LOOPBACK)
    stranger.wake([site.wakeups.address])
    site.wake("c")
    site.follower.wait()  # the clock stands still: only a wake-up can end it
    site.looks.take()
    assert site.follower.read_due() == []
    assert site.looks.take() == {"c": 1}
    stranger.close()


@pytest.mark.parametrize("size", [0, 1, TOKEN_BYTES - 1, TOKEN_BYTES, TOKEN_BYTES + 1, 1400])
def test_forged_notification_causes_no_read(site: Site, size: int) -> None:
    """A token that is wrong, too short or too long, also one that begins with the right one."""
    token = bytes.fromhex(site.wakeups.address.token)
    for forged in (b"\0" * size, (token + b"\0" * size)[:size]):
        if forged != token:
            site.sockets["a"]._socket.sendto(forged, site.wakeups.address.source)
            site.arrived()
            assert site.follower.read_due() == []
            assert not site.follower.woken
    assert site.looks.take() == {}


def test_valid_token_from_unknown_sender_causes_no_read(site: Site) -> None:
    stranger = WakeupSocket(LOOPBACK)
    stranger.wake([site.wakeups.address])
    site.arrived()
    assert site.follower.read_due() == []
    assert site.looks.take() == {}
    stranger.close()


def test_notification_for_an_older_incarnation_is_ignored(site: Site) -> None:
    """The new receiver got the port of the old one."""
    older = WakeupSocket(LOOPBACK)
    site.wake("a", WakeupAddress(*site.wakeups.address.source, older.address.token))
    assert site.follower.read_due() == []
    assert site.looks.take() == {}
    older.close()


def test_dead_port_does_not_block_other_notifications(site: Site) -> None:
    dead = WakeupSocket(LOOPBACK)
    address = dead.address
    dead.close()
    for _ in range(3):
        site.writers["a"].append({"n": 1})
        site.sockets["a"].wake([address, site.wakeups.address, address])
        site.arrived()
        assert site.follower.read_due() == [{"n": 1}]


def test_receiver_never_replies_to_notifications(site: Site) -> None:
    site.wake("a")
    site.follower.read_due()
    assert not select.select([site.sockets["a"]], [], [], 0)[0]


def test_each_receiver_has_its_own_token(site: Site) -> None:
    tokens = {wakeups.address.token for wakeups in (site.wakeups, *site.sockets.values())}
    assert len(tokens) == 4
    assert {wakeups.address.host for wakeups in site.sockets.values()} == {LOOPBACK}


def test_lost_notification_delays_messages_by_at_most_one_poll(site: Site) -> None:
    """After that, the next lost notification costs no more than polling, because polls are fast
    again.
    """
    site.send("a", 0)
    began = site.now
    site.writers["a"].append({"n": 1})
    while not (news := site.poll()):
        pass
    assert news == [{"n": 1}]
    assert site.now - began <= ANNOUNCED_FIRST_POLL_S
    began = site.now
    site.writers["a"].append({"n": 2})
    assert site.poll() == [{"n": 2}]
    assert site.now - began <= FIRST_POLL_S


def test_notification_flood_causes_no_more_reads_than_polling(site: Site) -> None:
    """An attacker on the network can replay notifications with the right token and source."""
    for _ in range(200):
        site.poll()  # a trial at rest
    site.looks.take()
    polls = 20
    for _ in range(polls):
        for _ in range(100):
            site.wake("a")
            assert site.follower.read_due() == []
        assert site.poll() == []
    looks = site.looks.take()
    assert looks["b"] == looks["c"] == polls
    assert looks["a"] <= 2 * polls + SPARE_LOOKS
    site.writers["a"].append({"n": 1})  # and it hides no news for longer than a poll
    assert site.poll() == [{"n": 1}]


@pytest.mark.usefixtures("shared")
def test_overflow_of_notifications_makes_the_follower_read_all_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand agents that answer at the same time overflow the master's receive buffer."""
    monkeypatch.setattr(module, "RECEIVE_BUFFER_BYTES", 1)  # the kernel's minimum
    site = Site(tmp_path)
    for writer in site.writers.values():
        writer.append({"n": 1})
    for _ in range(100):
        site.wake("a")
    site.wake("b")
    assert site.follower.read_due() == 3 * [{"n": 1}]
    assert site.looks.take() == {"a": 1, "b": 1, "c": 1}
    site.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host": "localhost"}, "'host', expected an IPv4 address"),
        ({"host": 7}, "'host', expected an IPv4 address"),
        ({"port": 0}, "'port', expected a port"),
        ({"port": 65536}, "'port', expected a port"),
        ({"port": True}, "'port', expected a port"),
        ({"token": "00"}, "'token', expected 32 hexadecimal digits"),
        ({"token": "zz" * 16}, "'token', expected 32 hexadecimal digits"),
        ({"token": None}, "has no 'token'"),
    ],
)
def test_notification_address_is_checked_before_use(
    changes: dict[str, object], message: str
) -> None:
    """A host name would be looked up, which can block for seconds."""
    good = {"host": LOOPBACK, "port": 9, "token": "0f" * TOKEN_BYTES}
    assert documents.to_json(documents.from_json(WakeupAddress, good, "a log")) == good
    with pytest.raises(CorruptFileError, match=message):
        documents.from_json(WakeupAddress, {**good, **changes}, "a log")


def test_receiver_needs_an_address_of_this_host() -> None:
    with pytest.raises(OSError, match="Cannot assign"):
        WakeupSocket("192.0.2.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind((LOOPBACK, 0))  # nothing is left behind that could not be bound again
