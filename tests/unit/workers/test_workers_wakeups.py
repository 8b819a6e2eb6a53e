"""The wake-ups of agents: the conditions for sending and accepting them, and their end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurmrl.fsio import documents
from slurmrl.fsio.calls import is_local
from slurmrl.run.channel import wakeups
from slurmrl.run.channel.message_log import LogReader
from slurmrl.run.channel.wakeups import WakeupAddress
from slurmrl.run.paths import RunPaths
from slurmrl.workers.agent.agent_host import Host
from slurmrl.workers.agent.incarnation import Incarnation


@pytest.fixture
def incarnation(run: RunPaths) -> Iterator[Incarnation]:
    host = Host(run, 1, "trainer")
    yield Incarnation(host, 0)
    host.children.close()


def test_each_incarnation_has_its_own_receiver(
    incarnation: Incarnation, run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wake-ups for an older incarnation do not reach it. Its socket is closed when the incarnation
    ends.
    """
    monkeypatch.setattr("slurmrl.run.channel.wakeups.is_local", lambda directory: False)
    addresses = []
    for number in (1, 2):
        served = Incarnation(incarnation.host, number - 1)
        served._join(number)
        (hello,) = LogReader(run.agent_log(number, "trainer", 0)).read()
        addresses.append(documents.from_json(WakeupAddress, hello["wakeups"], "hello"))
        served.close()
        assert served.replies is not None
        assert served.replies.socket is not None
        assert served.replies.socket.fileno() == -1
    assert addresses[0].token != addresses[1].token
    assert addresses[0].host == "127.0.0.1"  # the fabric address of a trial on one host


def test_host_without_a_fabric_address_polls(
    paths: RunPaths, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "is_local", lambda directory: False)
    assert wakeups.open_wakeups(paths.control, "no-such-interface", 2) is None
    assert "found only by polling" in caplog.text


def test_no_port_is_opened_on_a_local_file_system(paths: RunPaths) -> None:
    if not is_local(paths.control):
        pytest.skip(f"{paths.control} is not on a file system that is known to be local")
    assert wakeups.open_wakeups(paths.control, None, 1) is None
