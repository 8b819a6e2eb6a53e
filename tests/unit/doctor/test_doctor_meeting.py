"""Hosts that connect to each other. Each is a thread with a separate server."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slurmrl.desk.doctor import Check, State, meeting
from slurmrl.desk.doctor.meeting import ProbeHost
from slurmrl.errors import EnvironmentFailure


def place(folder: Path, task: int, hosts: int = 3) -> ProbeHost:
    return ProbeHost(folder, "token", task, hosts, "lo")


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten all timeouts."""
    monkeypatch.setattr(meeting, "MEET_S", 0.5)
    monkeypatch.setattr(meeting, "BYE_S", 0.5)
    monkeypatch.setattr(meeting, "LONGEST_DELAY_S", 0.3)


def meet(*places: ProbeHost) -> list[dict[str, list[Check]]]:
    """Return the files that each host found, by name."""
    with ThreadPoolExecutor(len(places)) as pool:
        results = list(pool.map(meeting.meet_hosts, places))
    return [
        {one.name: [other for other in found if other.name == one.name] for one in found}
        for found in results
    ]


def test_hosts_sharing_a_directory_pass_the_check(tmp_path: Path) -> None:
    first, *others = meet(*(place(tmp_path, task) for task in range(3)))
    assert {one.state for found in (first, *others) for each in found.values() for one in each} == {
        State.OK
    }
    assert len(first["directory between hosts"]) == len(first["clock difference"]) == 2
    for one in first["clock difference"]:
        assert abs(one.values["offset_s"]) <= one.values["within_s"] + 1e-3
    for found in others:
        assert set(found) == {"interface", "hosts meet", "connections"}


def test_directory_check_skips_a_single_host(tmp_path: Path) -> None:
    (found,) = meet(place(tmp_path, 0, hosts=1))
    assert set(found) == {"interface"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("hurried")
def test_host_with_another_directory_is_reported_missing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    found = meet(place(tmp_path / "a", 0, 2), place(tmp_path / "b", 1, 2))
    assert [each["hosts meet"][0].state for each in found] == [State.FAILED] * 2
    assert "no file of host 1 of 2" in found[0]["hosts meet"][0].measured


@pytest.mark.usefixtures("hurried")
def test_files_that_do_not_appear_are_reported(tmp_path: Path) -> None:
    """The other host uses a directory in which the first host's files never appear."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    server = meeting.Server(tmp_path / "b", "token", "127.0.0.1")
    try:
        (tmp_path / "a" / "address.1").write_text(f"127.0.0.1:{server.port}")
        (found,) = meet(place(tmp_path / "a", 0, 2))
    finally:
        server.close()
    (check,) = found["directory between hosts"]
    assert check.state is State.FAILED
    assert check.measured.count("more than") == 2
    assert "lookupcache" in check.advice


@pytest.mark.usefixtures("hurried")
def test_unreachable_host_is_named(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        (tmp_path / "address.1").write_text(f"127.0.0.1:{nobody.getsockname()[1]}")
        (found,) = meet(place(tmp_path, 0, 2))
    assert found["connections"][0].state is State.FAILED
    assert "Connection refused" in found["connections"][0].measured
    assert "cluster.interface" in found["connections"][0].advice


@pytest.fixture
def server(tmp_path: Path) -> meeting.Server:
    return meeting.Server(tmp_path, "token", "127.0.0.1")


def test_requests_without_the_token_are_rejected(server: meeting.Server, tmp_path: Path) -> None:
    address = f"127.0.0.1:{server.port}"
    try:
        with pytest.raises(EnvironmentFailure, match="wrong token"):
            meeting.ask(address, "guess", "make", "file.1.0")
        for name in ("../file.1.0", "/etc/passwd", "ask.json", "file.1.0/x"):
            with pytest.raises(EnvironmentFailure, match="is not allowed"):
                meeting.ask(address, "token", "make", name)
        with pytest.raises(EnvironmentFailure, match="unknown request"):
            meeting.ask(address, "token", "delete", "file.1.0")
        for line in (b"", b"[]", b"\xff", b'{"token": "token"}'):
            assert "error" in server.answer(line)
        assert list(tmp_path.iterdir()) == []
    finally:
        server.close()


def test_host_that_reads_stale_content_is_reported() -> None:
    def maker(do: str, name: str) -> dict[str, str]:
        return {"digest": "new"}

    asked = []

    def reader(do: str, name: str) -> dict[str, object]:
        asked.append(do)
        return {"delay_s": 0.25, "digest": "old"}

    assert meeting.file_delay(maker, reader, "file.1.0") == meeting.FileDelay(0.25, False)
    assert asked == ["miss", "see"]
