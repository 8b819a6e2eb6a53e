"""The recorded samples of steps: the lines that readers find after any kill."""

from __future__ import annotations

import errno
import json
import shutil
from itertools import count
from pathlib import Path

import pytest

from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio import documents
from slurmrl.fsio.calls import SystemCalls
from slurmrl.run import samples
from slurmrl.run.samples import KeptSampleWriter
from tests.support.faulty import Faulty


def rows(step: int, text: str) -> bytes:
    return b"".join(
        json.dumps({"step": step, "text": f"{text} {index}"}).encode() + b"\n" for index in range(2)
    )


def keep(
    folder: Path, incarnation: int, first: int, last: int, *, evaluation: bool = False
) -> KeptSampleWriter:
    """Run an incarnation from the step ``first`` that is killed after ``last``."""
    writer = KeptSampleWriter(folder, incarnation, first)
    writer.begin()
    for step in range(first, last + 1):
        writer.write(step, rows(step, f"by {incarnation}"), evaluation=evaluation)
    return writer


def read(folder: Path, *, evaluation: bool = False) -> dict[int, str]:
    """Return the text of each step. Its lines must be complete and belong to the step."""
    found = {}
    for step, place in samples.places(folder, evaluation=evaluation).items():
        with documents.opened(place.path) as file:
            values = [json.loads(raw) for raw in file.forward(place.start, place.stop)]
        assert [value["step"] for value in values] == [step] * 2
        found[step] = values[0]["text"].removesuffix(" 0")
    return found


def test_samples_of_many_steps_use_few_files(tmp_path: Path) -> None:
    keep(tmp_path, 1, 1, 1000)
    keep(tmp_path, 1, 1, 50, evaluation=True)
    names = ["00000001.1.index", "eval-step-00000001.1.jsonl", "step-00000001.1.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert list(read(tmp_path)) == list(range(1, 1001))
    assert list(read(tmp_path, evaluation=True)) == list(range(1, 51))
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_samples_continue_in_another_file_after_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "FILE_BYTES", 3 * len(rows(1, "by 1")))
    keep(tmp_path, 1, 1, 7)
    files = [f"step-{step:08d}.1.jsonl" for step in (1, 4, 7)]
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == files
    assert list(read(tmp_path)) == list(range(1, 8))
    (tmp_path / files[1]).unlink()
    assert list(read(tmp_path)) == [1, 2, 3, 7], "a user may remove files"


def test_repeated_steps_come_from_the_newest_incarnation(tmp_path: Path) -> None:
    """The second incarnation continues from the commit of step 4, the third from that of step 2,
    because the checkpoint of step 4 is damaged. The first one still lives and writes.
    """
    stale = keep(tmp_path, 1, 0, 6)
    keep(tmp_path, 2, 5, 8)
    assert read(tmp_path) == {step: f"by {1 if step < 5 else 2}" for step in range(9)}
    KeptSampleWriter(tmp_path, 3, 3).begin()
    stale.write(7, rows(7, "by 1"), evaluation=False)
    assert read(tmp_path) == dict.fromkeys(range(3), "by 1")
    keep(tmp_path, 10, 3, 3)
    assert read(tmp_path) == {**dict.fromkeys(range(3), "by 1"), 3: "by 10"}


def test_older_files_of_single_steps_are_read(tmp_path: Path) -> None:
    """Earlier versions wrote them."""
    for step in (1, 2, 3):
        (tmp_path / f"step-{step:08d}.jsonl").write_bytes(rows(step, "old"))
        (tmp_path / f"eval-step-{step:08d}.jsonl").write_bytes(rows(step, "judged"))
    assert read(tmp_path) == dict.fromkeys((1, 2, 3), "old")
    keep(tmp_path, 2, 3, 4)
    assert read(tmp_path) == {1: "old", 2: "old", 3: "by 2", 4: "by 2"}
    assert read(tmp_path, evaluation=True) == dict.fromkeys((1, 2), "judged")


def test_complete_steps_are_readable_after_a_kill_at_any_operation(tmp_path: Path) -> None:
    for at in count():
        folder, written = tmp_path / str(at), []
        writer = KeptSampleWriter(folder, 1, 1, calls=Faulty(at, errno.EIO, times=10**6))
        try:
            writer.begin()
            for step in (1, 2):
                writer.write(step, rows(step, "by 1"), evaluation=False)
                written.append(step)
        except EnvironmentFailure:
            found = read(folder)
            assert list(found) in (written, [*written, len(written) + 1])
            keep(folder, 2, 2, 3)
            assert read(folder) == {step: found[step] for step in found if step < 2} | {
                2: "by 2",
                3: "by 2",
            }
        else:
            assert at > 20
            return


class FullDisk(SystemCalls):
    """File operations in which every ``period``-th write is partial."""

    def __init__(self, period: int) -> None:
        self.period = period
        self.writes = 0

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        self.writes += 1
        if self.writes % self.period:
            return super().write(descriptor, data)
        super().write(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "full")


@pytest.mark.parametrize("period", [3, 4, 5])
def test_samples_are_complete_after_a_full_disk(tmp_path: Path, period: int) -> None:
    writer = KeptSampleWriter(tmp_path, 1, 1, calls=FullDisk(period))
    for step in range(1, 9):
        for _ in range(10):
            try:
                writer.write(step, rows(step, "by 1"), evaluation=False)
                break
            except EnvironmentFailure:
                assert list(read(tmp_path)) == list(range(1, step))
    assert read(tmp_path) == dict.fromkeys(range(1, 9), "by 1")


def test_samples_are_written_after_their_directory_was_removed(tmp_path: Path) -> None:
    """A purge of empty folders must not stop a run."""
    folder = tmp_path / "samples"
    writer = keep(folder, 1, 1, 2)
    shutil.rmtree(folder)
    assert read(folder) == {}
    writer.write(3, rows(3, "by 1"), evaluation=False)
    assert read(folder) == {3: "by 1"}


@pytest.mark.parametrize(
    "line",
    [
        {"step": 2, "file": "../metrics.jsonl", "start": 0, "stop": 9},
        {"step": 2, "file": "step-00000002.1.jsonl", "start": 0, "stop": 9},
        {"step": 2, "file": "step-00000001.1.jsonl", "start": -1, "stop": 9},
        {"step": 2, "file": "step-00000001.1.jsonl"},
        {"step": "2", "file": "step-00000001.1.jsonl", "start": 0, "stop": 9},
        ["step", 2],
    ],
)
def test_damaged_index_line_is_left_out(tmp_path: Path, line: object) -> None:
    keep(tmp_path, 1, 1, 1)
    (tmp_path.parent / "metrics.jsonl").write_text("{}\n")
    with (tmp_path / "00000001.1.index").open("ab") as file:
        file.write(json.dumps(line).encode() + b"\n")
    assert read(tmp_path) == {1: "by 1"}
