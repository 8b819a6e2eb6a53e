from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest

from slurmrl.errors import CorruptFileError, EnvironmentFailure, UsageError
from slurmrl.fsio.calls import SystemCalls
from slurmrl.run.channel.message_log import LOOK_AGAIN_EVERY, LogReader, LogWriter, encode
from tests.support.faulty import Faulty as Recording
from tests.support.replaced import replace


def test_messages_arrive_once_and_in_order(tmp_path: Path) -> None:
    writer, reader = LogWriter(tmp_path / "log"), LogReader(tmp_path / "log")
    late = LogReader(tmp_path / "log")
    assert reader.read() == []
    writer.append({"n": 0})
    writer.append({"n": 1}, {"n": 2})
    assert reader.read() == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert reader.read() == []
    writer.append()
    writer.append({"n": 3})
    assert reader.read() == [{"n": 3}]
    assert [message["n"] for message in late.read()] == [0, 1, 2, 3]


def test_log_file_exists_at_once_and_is_private(tmp_path: Path) -> None:
    before = os.umask(0o277)
    LogWriter(tmp_path / "log")
    os.umask(before)
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        LogWriter(tmp_path / "log")
    with pytest.raises(EnvironmentFailure):
        LogWriter(tmp_path / "gone" / "log")


def test_incomplete_message_is_read_once_complete(tmp_path: Path) -> None:
    path, data = tmp_path / "log", encode({"n": 0}) + encode({"n": 1})
    reader = LogReader(path)
    seen = []
    for stop in range(len(data) + 1):
        path.write_bytes(data[:stop])
        seen.append(reader.read())
    assert [messages for messages in seen if messages] == [[{"n": 0}], [{"n": 1}]]
    assert seen[len(encode({"n": 0}))] == [{"n": 0}]


def test_zeros_in_a_log_are_treated_as_unwritten_data(tmp_path: Path) -> None:
    path, data = tmp_path / "log", encode({"n": 0})
    path.write_bytes(b"\x00" * len(data))
    reader = LogReader(path)
    assert reader.read() == []
    path.write_bytes(data)
    assert reader.read() == [{"n": 0}]


def test_error_about_hostile_content_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(encode({}).replace(b"{}", b"[]"))
    assert LogReader(tmp_path / "log").read() == []
    from slurmrl.run.channel.message_log import HEAD, MAGIC, _checksum

    (tmp_path / "log").write_bytes(HEAD.pack(MAGIC, 2, _checksum(b"[]")) + b"[]")
    with pytest.raises(CorruptFileError, match=str(tmp_path / "log")):
        LogReader(tmp_path / "log").read()


class Faulty(SystemCalls):
    """File operations with a full disk, or a close that reports an earlier error."""

    def __init__(self) -> None:
        self.room: int | None = None
        self.close_fails = False
        self.stale = False

    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "full")
        written = super().pwrite(descriptor, data[: self.room], offset)
        if self.room is not None:
            self.room -= written
        return written

    def pread(self, descriptor: int, count: int, offset: int) -> bytes:
        if self.stale:
            raise OSError(errno.ESTALE, "stale")
        return super().pread(descriptor, count, offset)

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        if self.close_fails:
            raise OSError(errno.EDQUOT, "quota")


@pytest.mark.parametrize("room", [0, 1, 11, 12, 20])
def test_failed_append_stays_queued_and_is_written_first(tmp_path: Path, room: int) -> None:
    calls = Faulty()
    writer, reader = LogWriter(tmp_path / "log", calls=calls), LogReader(tmp_path / "log")
    writer.append({"n": 0})
    calls.room = room
    with pytest.raises(EnvironmentFailure, match="No space"):
        writer.append({"n": 1, "long": "x" * 100})
    seen = reader.read()
    with pytest.raises(EnvironmentFailure):
        writer.append({"n": 2})
    calls.room = None
    writer.append()
    writer.append({"n": 3})
    assert [message["n"] for message in seen + reader.read()] == [0, 1, 2, 3]


def test_readers_agree_after_a_failed_close(tmp_path: Path) -> None:
    calls = Faulty()
    writer, early = LogWriter(tmp_path / "log", calls=calls), LogReader(tmp_path / "log")
    calls.close_fails = True
    with pytest.raises(EnvironmentFailure, match="quota"):
        writer.append({"n": 0})
    seen = early.read()
    calls.close_fails = False
    writer.append({"n": 1})
    assert seen + early.read() == LogReader(tmp_path / "log").read() == [{"n": 0}, {"n": 1}]


def test_stale_handle_reads_as_no_new_messages(tmp_path: Path) -> None:
    LogWriter(tmp_path / "log").append({"n": 0})
    calls = Faulty()
    reader = LogReader(tmp_path / "log", calls=calls)
    calls.stale = True
    assert reader.read() == []
    calls.stale = False
    assert reader.read() == [{"n": 0}]


def test_reader_of_a_missing_file_bypasses_directory_caches(tmp_path: Path) -> None:
    calls = Recording()
    reader = LogReader(tmp_path / "log", calls=calls)
    for _ in range(3 * LOOK_AGAIN_EVERY):
        assert reader.read() == []
    assert calls.names.count("listdir") == 3
    gone = LogReader(tmp_path / "gone" / "log")
    with pytest.raises(EnvironmentFailure):
        [gone.read() for _ in range(LOOK_AGAIN_EVERY)]


def test_append_and_read_take_three_operations(tmp_path: Path) -> None:
    calls = Recording()
    writer = LogWriter(tmp_path / "log", calls=calls)
    reader = LogReader(tmp_path / "log", calls=calls)
    calls.names.clear()
    writer.append({"n": 0}, {"n": 1})
    assert calls.names == ["open", "pwrite", "close"]
    calls.names.clear()
    reader.read()
    assert calls.names == ["open", "pread", "close"]


def test_durable_append_is_on_disk_before_it_returns(tmp_path: Path) -> None:
    calls = Recording()
    writer = LogWriter(tmp_path / "log", calls=calls, durable=True)
    calls.names.clear()
    writer.append({"n": 0})
    assert calls.names == ["open", "pwrite", "fsync", "close"]


SEGMENT = 300


def test_full_log_file_continues_in_the_next_file(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "log", segment_bytes=SEGMENT)
    early, late = LogReader(tmp_path / "log"), LogReader(tmp_path / "log")
    seen = []
    for number in range(100):
        writer.append({"n": number}, {"n": number, "long": "x" * (number % 50)})
        seen += early.read()
    assert [message["n"] for message in seen] == [number for number in range(100) for _ in "ab"]
    assert late.read() == seen
    assert late.path == early.path != tmp_path / "log"
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) > 10
    assert max(sizes) < SEGMENT + 300
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("room", range(0, 260, 13))
def test_log_rotation_is_retried_after_a_full_disk(tmp_path: Path, room: int) -> None:
    calls = Faulty()
    writer = LogWriter(tmp_path / "log", calls=calls, segment_bytes=SEGMENT)
    reader = LogReader(tmp_path / "log")
    writer.append({"n": 0, "long": "x" * SEGMENT})
    seen = reader.read()
    calls.room = room
    for number in (1, 2):
        with suppress(EnvironmentFailure):
            writer.append({"n": number, "long": "x" * 60})
        seen += reader.read()
    calls.room = None
    writer.append({"n": 3})
    assert [message["n"] for message in seen + reader.read()] == [0, 1, 2, 3]


def test_log_is_created_again_only_with_its_nonce(tmp_path: Path) -> None:
    LogWriter(tmp_path / "log", nonce="ours")
    writer = LogWriter(tmp_path / "log", nonce="ours")
    writer.append({"n": 0})
    with pytest.raises(FileExistsError):
        LogWriter(tmp_path / "log", nonce="theirs")
    assert LogReader(tmp_path / "log").read() == [{"n": 0}]


def test_message_with_a_reserved_key_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="log"):
        LogWriter(tmp_path / "log").append({"$log": {"next": 1}})


@pytest.mark.parametrize("kind", ["folder", "fifo", "link"])
def test_replaced_log_file_is_damage_for_writer_and_reader(tmp_path: Path, kind: str) -> None:
    """A retry would not help: without an error both would wait forever."""
    path = tmp_path / "log"
    writer, reader = LogWriter(path), LogReader(path)
    writer.append({"n": 1})
    assert reader.read() == [{"n": 1}]
    replace(path, kind)
    for action in (lambda: writer.append({"n": 2}), reader.read):
        with pytest.raises(CorruptFileError, match=f"{path} is .*, not a regular file; the next"):
            action()
