"""A process with much output: its log on disk is limited, the newest part is kept, readers miss
nothing, and other processes are not affected.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmrl.cli.logs import Printer
from slurmrl.fsio import atomic
from slurmrl.run.paths import rotated
from slurmrl.watch.log_files import LogFile, OutputReader
from slurmrl.workers.agent.agent_host import Output

LIMIT = 40_000
PART = LIMIT // 4
LINE = "line {:09d}\n"
BYTES = len(LINE.format(0))


class Task:
    """The output of task 3's second attempt, with a clock that the test moves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "3.1.log"
        self.now = 0.0
        self.output = Output(self.path, LIMIT, 10.0, lambda: self.now)
        self.written = 0
        self.file = atomic.open_log(self.path)

    def write(self, size: int) -> None:
        for _ in range(size // BYTES):
            self.file.write(LINE.format(self.written).encode())
            self.written += 1

    def look(self, seconds: float = 10.0) -> None:
        self.now += seconds
        self.output.look()

    def size(self) -> int:
        return sum(file.stat().st_size for file in self.folder.iterdir())


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Task]:
    found = Task(tmp_path)
    yield found
    found.file.close()


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"line (\d+)", text)]


def test_output_flood_is_limited_to_its_newest_part(task: Task) -> None:
    for _ in range(50):
        task.write(PART // 2)
        task.look()
        assert task.size() <= 3 * PART
    kept = numbers(rotated(task.path).read_text() + task.path.read_text())
    assert kept == list(range(kept[0], task.written))
    assert len(kept) * BYTES > PART
    assert "at most the last earlier part is kept (logging.output_mib)" in task.path.read_text()


def test_output_burst_keeps_its_end_and_names_the_dropped_size(task: Task) -> None:
    task.write(20 * PART)
    task.look()
    text = rotated(task.path).read_text()
    assert numbers(text)[-1] == task.written - 1
    dropped = task.written * BYTES - PART
    assert text.startswith(f"--- slurmrl: part 1 of this output without its first {dropped} bytes;")
    assert task.size() < 2 * PART


def test_fast_growing_output_is_checked_sooner(task: Task) -> None:
    task.write(PART * 8 // 10)
    task.look()
    task.write(PART)
    task.look(2.0)  # at this rate, it is full in 2.5 s
    assert rotated(task.path).exists()


def test_follow_shows_each_line_once_across_rotations(
    task: Task, capsys: pytest.CaptureFixture[str]
) -> None:
    printer = Printer(OutputReader())
    for turn in range(30):
        task.write(PART * 2 // 5)
        if turn % 2:
            task.look()
            task.write(PART // 10)
        printer.print([LogFile("trainer/3", task.path)], torn=False)
    assert numbers(capsys.readouterr().out) == list(range(task.written))


def test_follow_reports_missed_lines(task: Task, capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer(OutputReader())
    task.write(PART // 2)
    printer.print([LogFile("trainer/3", task.path)], torn=False)
    for _ in range(4):
        task.write(2 * PART)
        task.look()
    printer.print([LogFile("trainer/3", task.path)], torn=False)
    out = capsys.readouterr().out
    assert numbers(out)[-1] == task.written - 1
    assert "part 4 of this output without its first" in out


def test_output_of_earlier_attempts_is_removed_first(task: Task) -> None:
    for name, size in (("3.0.log", LIMIT), ("3.0.stacks-1.0.txt", 10), ("30.0.log", LIMIT)):
        (task.folder / name).write_bytes(b"x" * size)
    task.write(PART // 2)
    task.output.prune()
    names = {file.name for file in task.folder.iterdir()}
    assert names == {"3.0.stacks-1.0.txt", "3.1.log", "30.0.log"}


def test_output_is_limited_on_a_full_disk(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes, **more: object) -> None:
        raise atomic.explain(OSError(28, os.strerror(28)), "replace", path)

    monkeypatch.setattr(atomic, "replace", full)
    task.write(3 * PART)
    task.look()
    assert task.size() < 1000
    task.write(100)
    assert numbers(task.path.read_text())[-1] == task.written - 1


PRINTS = """
import os, sys
from slurmrl.workers import child_process
room, full = int(sys.argv[1]), os.open("/dev/full", os.O_WRONLY)
os.dup2(full, 1)
child_process.drop_failed_output()
print("lost" * 10, flush=True)
sys.stdout.write("lost too\\n")
sys.stdout.flush()
os.dup2(room, 1)
print("kept", flush=True)
"""


def test_printing_to_a_full_disk_raises_no_error(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as file:
        command = [sys.executable, "-c", PRINTS, str(file.fileno())]
        subprocess.run(command, pass_fds=[file.fileno()], check=True, timeout=60)
    text = (tmp_path / "out").read_text()
    assert text.endswith("kept\n")
    assert "--- slurmrl: 50 bytes of output were dropped: No space left on device ---" in text
