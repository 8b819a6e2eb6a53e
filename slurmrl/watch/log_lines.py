"""Lines of output as people read them: of several files by their times, entries kept together.

An entry is a line of our own loggers (see `slurmrl.log`) with all that follows it in its file: a
traceback, or what a library prints. A traceback that nobody announced is an entry of its own.
"""

from __future__ import annotations

import heapq
import logging
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from slurmrl.fsio import lines
from slurmrl.fsio.lines import LineFile
from slurmrl.run.paths import rotated
from slurmrl.watch.log_files import HEAD_BYTES, LogFile, part

LEVELS = logging.getLevelNamesMapping()
SEARCHED = 1000
"""Most lines before the wanted ones to search for the beginning of their entry."""
_ENTRY = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) \[(?P<process>[^]]+)\] (?P<level>[A-Z]+) ?"
    r"(?P<text>.*)",
    re.S,
)
_REPORTS = ("Traceback (most recent call last):", "Fatal Python error:")


class LogLine(NamedTuple):
    label: str
    """Of its file: ``trainer/0``."""
    time: float | None
    """Seconds since the epoch by the writer's clock; None before the first entry of a file."""
    process: str
    """``rank 3``, ``master``; the label before the first entry of a file."""
    level: str
    """``INFO``; empty before the first entry of a file."""
    text: str
    first: bool
    """Whether this is the first line of a logger's entry."""


@dataclass(frozen=True)
class Wanted:
    """The entries to print; None and 0 leave none out. Lines before the first entry of a file are
    left out only by a ``process`` or a ``level``."""

    process: str | None = None
    """A pattern for the process or the label of its file: ``rank *``."""
    level: int = 0
    since: float = 0.0
    """Seconds since the epoch."""

    @property
    def all(self) -> bool:
        return self == Wanted()

    def takes(self, line: LogLine) -> bool:
        names = (line.process, line.label)
        return (
            (self.process is None or any(fnmatchcase(name, self.process) for name in names))
            and LEVELS.get(line.level, 0) >= self.level
            and (line.time is None or line.time >= self.since)
        )


class OutputReader:
    """Reads what was added to log files since the last time, across their rotation."""

    def __init__(self, wanted: Wanted | None = None, last: int | None = None) -> None:
        """``last``: how many lines the first reading returns at most; None: all. Then and with a
        time in ``wanted``, earlier parts of the files are not read."""
        self._wanted = wanted or Wanted()
        self._last = last
        self._begun = False
        self._read: dict[Path, tuple[int, int]] = {}
        """Part and offset in it."""
        self._heads: dict[Path, LogLine] = {}
        """The newest entry."""

    def read(self, files: Sequence[LogFile], *, torn: bool) -> Iterator[LogLine]:
        """Yield new lines in the order of their entries' times. ``torn``: an unfinished last line,
        too; otherwise it follows once it is complete."""
        last = None if self._begun else self._last
        if not self._begun and (last is not None or self._wanted.since):
            self._read = {file.path: _Tail(self._wanted, last, file).start() for file in files}
        self._begun = True
        each = (self._of(file, torn) for file in files)
        merged = (line for _, line in heapq.merge(*each, key=itemgetter(0)))
        yield from merged if last is None else deque(merged, maxlen=last)

    def _of(self, file: LogFile, torn: bool) -> Iterator[tuple[float, LogLine]]:
        """Yield the wanted lines of a file, each with its place among those of other files."""
        head = self._heads.get(file.path, LogLine(file.label, None, file.label, "", "", False))
        place = head.time or 0.0
        for raw in self._new_lines(file.path, torn):
            for text in raw.decode(errors="replace").splitlines():
                line = parse(text, head)
                place = max(place, line.time or 0.0)
                head = line
                if self._wanted.takes(line):
                    yield place, line
        self._heads[file.path] = head

    def _new_lines(self, path: Path, torn: bool) -> Iterator[bytes]:
        read, offset = self._read.get(path, (0, 0))
        with lines.opened(path) as file:
            now = part(file.first(HEAD_BYTES))
            if now.number != read:
                yield from self._rotated_lines(path, now.number, read, offset)
                offset = 0
            yield from file.forward(offset, torn=torn)
            self._read[path] = now.number, file.offset

    def _rotated_lines(self, path: Path, now: int, read: int, offset: int) -> Iterator[bytes]:
        """Yield the lines of the previous part that were not read yet."""
        try:
            with lines.opened(rotated(path)) as file:
                before = part(file.first(HEAD_BYTES))
                if before.number >= now:
                    return  # rotation is under way: the file itself still has all lines
                start = 0  # the head of a part not seen before says how much is missing
                if before.number == read:
                    start = (
                        before.head_bytes + offset - before.skipped if before.skipped else offset
                    )
                yield from file.forward(max(start, 0), torn=True)
        except FileNotFoundError:
            return


def parse(text: str, before: LogLine) -> LogLine:
    """Return a line as part of its entry; ``before`` is the line before it in its file."""
    found = _ENTRY.fullmatch(text)
    if found and (time := _seconds(found["time"])) is not None and found["level"] in LEVELS:
        values = found["process"], found["level"], found["text"]
        return LogLine(before.label, time, *values, first=True)
    report = text.startswith(_REPORTS) and LEVELS.get(before.level, 0) < logging.WARNING
    if report:
        return before._replace(process=before.label, level="ERROR", text=text, first=False)
    return before._replace(text=text, first=False)


def _seconds(text: str) -> float | None:
    """Return the seconds since the epoch of a local time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


class _Tail:
    """Searches a file and the part before it backward for where the wanted lines begin."""

    def __init__(self, wanted: Wanted, last: int | None, file: LogFile) -> None:
        self._wanted = wanted
        self._last = last
        self._path = file.path
        self._nobody = LogLine(file.label, None, file.label, "", "", False)
        self._found = self._open = 0
        """Lines of wanted entries, and of the one whose beginning was not seen yet."""

    def start(self) -> tuple[int, int]:
        """Return part and offset; (0, 0) for the beginning of the previous part."""
        with lines.opened(self._path) as file:
            now = part(file.first(HEAD_BYTES))
            offset = self._search(file)
        if offset is not None:
            return now.number, offset
        try:
            with lines.opened(rotated(self._path)) as file:
                before = part(file.first(HEAD_BYTES))
                offset = self._search(file) if before.number < now.number else None
        except FileNotFoundError:
            return 0, 0
        if offset is None:
            return 0, 0
        return before.number, offset + before.skipped - (before.head_bytes if before.skipped else 0)

    def _search(self, file: LineFile) -> int | None:
        """Return the offset of the first entry to read; None if it may lie before this file."""
        later = None
        for offset, raw in file.backward():
            later = later or offset + len(raw) + 1
            self._open += 1
            line = parse(raw.decode(errors="replace"), self._nobody)
            if line.first and line.time is not None:
                if line.time < self._wanted.since:
                    return later
                self._found += self._open * self._wanted.takes(line)
                self._open, later = 0, offset
                enough = self._found
            else:  # a flood of lines that belong to no entry
                enough = self._found + self._open - SEARCHED if self._wanted.all else 0
            if self._last is not None and enough >= self._last:
                return offset
        return None
