from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmrl.errors import CorruptFileError, EnvironmentFailure, SlotTakenError
from slurmrl.fsio.calls import SystemCalls
from slurmrl.run.history.slots import History, Kind


class NoSleep(SystemCalls):
    def __init__(self) -> None:
        self.slept = 0.0

    def sleep(self, seconds: float) -> None:
        self.slept += seconds

    def caches(self, directory: Path) -> bool:
        return False


class Shared(NoSleep):
    def caches(self, directory: Path) -> bool:
        return True


def test_appended_records_are_read(tmp_path: Path) -> None:
    history = History(tmp_path, clock=lambda: 5.0)
    assert history.read() == []
    first = history.append(Kind.BEGIN, 1, {"job": "7"}, after=-1)
    second = history.append(Kind.COMMIT, 1, {"step": 1, "directory": "d"}, after=0)
    assert history.read() == History(tmp_path).read() == [first, second]
    assert (second.slot, second.time) == (1, 5.0)
    assert sorted(os.listdir(tmp_path)) == ["00000000", "00000001"]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_history_slot_is_won_by_one_writer(tmp_path: Path) -> None:
    ours, theirs = History(tmp_path), History(tmp_path)
    ours.append(Kind.BEGIN, 1, {}, after=-1)
    with pytest.raises(SlotTakenError) as caught:
        theirs.append(Kind.BEGIN, 1, {}, after=-1)
    assert caught.value.args == (0,)
    assert theirs.read() == ours.read()


def test_reads_see_records_of_other_writers(tmp_path: Path) -> None:
    reader, writer = History(tmp_path), History(tmp_path)
    for slot in range(5):
        writer.append(Kind.BEGIN, slot + 1, {}, after=slot - 1)
        assert [record.slot for record in reader.read()] == list(range(slot + 1))


def test_leftovers_and_foreign_files_are_ignored(tmp_path: Path) -> None:
    History(tmp_path).append(Kind.BEGIN, 1, {}, after=-1)
    for name in (".tmp.abc", ".nfs0000", "notes", "7", "x0000001"):
        (tmp_path / name).write_text("{")
    assert len(History(tmp_path).read()) == 1


def test_corrupt_slot_is_reported(tmp_path: Path) -> None:
    History(tmp_path).append(Kind.BEGIN, 1, {}, after=-1)
    (tmp_path / "00000001").write_bytes(b'{"slot": 1')
    with pytest.raises(CorruptFileError, match="00000001 is not JSON"):
        History(tmp_path).read()


def test_missing_slot_is_corruption_only_after_the_cache_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    History(tmp_path).append(Kind.BEGIN, 1, {}, after=-1)
    (tmp_path / "00000002").write_text("{}")
    calls = Shared()
    for look in (lambda h: h.read(), lambda h: h.record(1)):
        calls.slept = 0.0
        with pytest.raises(CorruptFileError, match="00000001 is missing although slot 2"):
            look(History(tmp_path, calls=calls))
        assert calls.slept > 60
        assert caplog.messages[-1].startswith(f"{tmp_path}/00000001 was created but is not visible")


def test_missing_slot_on_a_local_file_system_is_reported_at_once(tmp_path: Path) -> None:
    History(tmp_path).append(Kind.BEGIN, 1, {}, after=-1)
    (tmp_path / "00000002").write_text("{}")
    calls = NoSleep()
    for look in (lambda h: h.read(), lambda h: h.record(1)):
        with pytest.raises(CorruptFileError, match="00000001 is missing although slot 2"):
            look(History(tmp_path, calls=calls))
    assert calls.slept < 2


class HidesNewFiles(NoSleep):
    """File operations whose cache hides the newest files for a number of pauses."""

    hidden = 3

    def sleep(self, seconds: float) -> None:
        self.hidden -= 1

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        if self.hidden and path.name == "00000001":
            raise FileNotFoundError(2, "hidden")
        return super().open(path, flags, mode)

    def listdir(self, directory: Path) -> list[str]:
        return [name for name in super().listdir(directory) if name != "00000001"]


def test_read_waits_for_a_slot_that_must_exist(tmp_path: Path) -> None:
    writer = History(tmp_path)
    writer.append(Kind.BEGIN, 1, {}, after=-1)
    writer.append(Kind.BEGIN, 2, {}, after=0)
    history = History(tmp_path, calls=HidesNewFiles())
    assert len(history.read()) == 1
    assert len(history.read(at_least=2)) == 2


def test_missing_history_directory_is_reported(tmp_path: Path) -> None:
    history = History(tmp_path / "gone")
    assert history.read() == []
    with pytest.raises(EnvironmentFailure):
        history.append(Kind.BEGIN, 1, {}, after=-1)
