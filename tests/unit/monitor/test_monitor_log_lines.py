"""Output of several processes as one readable stream, and its newest lines alone."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from slurmrl.cli.main import main
from slurmrl.fsio import documents
from slurmrl.run.paths import rotated
from slurmrl.watch.log_files import LogFile, OutputReader, Wanted, head
from tests.fake_runs import FakeRun

DAY = "2026-01-31"
MASTER = f"""\
{DAY} 14:00:00,000 [master] INFO incarnation 1
{DAY} 14:00:02,500 [master] WARNING slow
{DAY} 14:00:04,000 [master] INFO step 1
"""
TRAINER = f"""\
printed before any entry
{DAY} 14:00:01,000 [rank 0] ERROR it failed
Traceback (most recent call last):
  File "a.py", line 1
ValueError: no
{DAY} 14:00:03,000 [agent trainer/0] INFO waits
Traceback (most recent call last):
KeyError: 1
{DAY} 99:99:99,000 [rank 0] INFO broken time
{DAY} 14:00:05,000 [rank 1] INFO \udcff cut he"""


def seconds(clock: str) -> float:
    return datetime.fromisoformat(f"{DAY} {clock}").timestamp()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    monkeypatch.setenv("SLURMRL_ROOT", str(tmp_path))
    run = FakeRun(tmp_path)
    run.log("0.0.log", MASTER, group="master")
    run.log("0.0.log", "")
    (run.paths.logs / "trainer" / "0.0.log").write_bytes(TRAINER.encode(errors="surrogateescape"))
    return run


def logs(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    assert main(["logs", "add/1", *options]) == 0
    return capsys.readouterr().out.splitlines()


def test_lines_of_all_processes_are_sorted_by_time_with_tracebacks(
    run: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid line keeps its place in its file, and a truncated line is shown."""
    assert logs(capsys) == [
        "trainer/0 | printed before any entry",
        "01-31 14:00:00.0  master  INFO     incarnation 1",
        "01-31 14:00:01.0  rank 0  ERROR    it failed",
        "  Traceback (most recent call last):",
        '    File "a.py", line 1',
        "  ValueError: no",
        "01-31 14:00:02.5  master  WARNING  slow",
        "01-31 14:00:03.0  agent trainer/0  INFO     waits",
        "  Traceback (most recent call last):",
        "  KeyError: 1",
        f"  {DAY} 99:99:99,000 [rank 0] INFO broken time",
        "01-31 14:00:04.0  master           INFO     step 1",
        "01-31 14:00:05.0  rank 1           INFO     \ufffd cut he",
    ]


def test_lines_are_selected_by_level_process_time_and_number(
    run: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """The selection by level keeps tracebacks without a log line."""
    shown = logs(capsys, "--level", "warning")
    assert [line.strip().split("  ")[-1] for line in shown] == [
        "it failed",
        "Traceback (most recent call last):",
        'File "a.py", line 1',
        "ValueError: no",
        "slow",
        "Traceback (most recent call last):",
        "KeyError: 1",
        f"{DAY} 99:99:99,000 [rank 0] INFO broken time",
    ]
    assert len(logs(capsys, "--process", "rank *")) == 5
    assert len(logs(capsys, "--process", "trainer/0")) == 10
    assert [line.split()[-1] for line in logs(capsys, "--since", f"{DAY} 14:00:04")] == ["1", "he"]
    assert [line.split()[-1] for line in logs(capsys, "-n", "2")] == ["1", "he"]
    assert [line.split()[-1] for line in logs(capsys, "-n", "1", "--process", "m*")] == ["1"]
    assert logs(capsys, "-n", "0") == []
    assert main(["logs", "add/1", "--level", "critical"]) == 0
    assert capsys.readouterr().err == "no line matches\n"


def test_json_lines_have_documented_fields(
    run: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[dict[str, Any]] = [json.loads(line) for line in logs(capsys, "--json")]
    nobody = {"time": None, "process": "trainer/0", "level": None}
    assert found[0] == {"file": "trainer/0", **nobody, "text": "printed before any entry"}
    entry = {"file": "trainer/0", "time": seconds("14:00:01"), "process": "rank 0"}
    assert found[2] == {**entry, "level": "ERROR", "text": "it failed"}
    assert found[5] == {**entry, "level": "ERROR", "text": "ValueError: no"}


@pytest.mark.parametrize("wanted", [Wanted(), Wanted(since=seconds("14:00:00"))])
def test_newest_lines_are_read_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: Wanted
) -> None:
    """Readers read only the end of a long file. If a file was just rotated, they also read the
    previous part.
    """
    path = tmp_path / "0.0.log"
    old, new = f"{DAY} 13:00:00,000 [rank 0] INFO old\n", f"{DAY} 14:00:00,000 [rank 0] INFO"
    rotated(path).write_text(old * 100_000 + f"{new} first\ndetail\n")
    path.write_bytes(head(2, 0) + f"{new} second\n".encode())
    read = 0
    pread = documents.LineFile._read

    def counted(self: documents.LineFile, offset: int, count: int) -> bytes:
        nonlocal read
        read += count
        return pread(self, offset, count)

    monkeypatch.setattr(documents.LineFile, "_read", counted)
    last = None if wanted.since else 4
    found = OutputReader(wanted, last).read([LogFile("trainer/0", path)], torn=True)
    texts = [line.text for line in found if not line.text.startswith("---")]
    assert texts == ["first", "detail", "second"]
    assert read < 500_000


def test_follow_continues_after_the_newest_lines(tmp_path: Path) -> None:
    """Following lines of the same entry keep its process."""
    path = tmp_path / "0.0.log"
    path.write_text(f"one\n{DAY} 14:00:00,000 [rank 3] WARNING two\n")
    reader = OutputReader(Wanted(process="rank 3"), 1)
    files = [LogFile("trainer/0", path)]
    assert [line.text for line in reader.read(files, torn=False)] == ["two"]
    with path.open("a") as file:
        file.write("three\nfour")
    assert [(line.text, line.process) for line in reader.read(files, torn=False)] == [
        ("three", "rank 3")
    ]


def test_output_without_log_entries_is_not_read_to_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "0.0.log"
    path.write_text("".join(f"line {number}\n" for number in range(10_000)))
    found = OutputReader(last=2).read([LogFile("trainer/0", path)], torn=True)
    assert [line.text for line in found] == ["line 9998", "line 9999"]
