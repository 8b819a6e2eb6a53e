"""The log files of a trial's newest attempts, their merged lines, and stacks of its processes.

Lines of several files are merged by their times, without splitting entries. An entry is a line of
slurmrl's loggers (see `slurmrl.log`) and the following lines: a traceback, or output of a library.
A traceback without a preceding error of a logger is a separate entry.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from slurmrl.backoff import Backoff
from slurmrl.errors import NameExistsError, UnknownNameError, UsageError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.calls import corrupt
from slurmrl.fsio.documents import LineFile
from slurmrl.name_resolve.store import NameStore
from slurmrl.registry import near
from slurmrl.run import keys
from slurmrl.run.history.state import begin_of
from slurmrl.run.paths import RunPaths, rotated
from slurmrl.run.reports import MASTER, TRAINERS, StacksRequest
from slurmrl.watch import published
from slurmrl.watch.snapshot import read_groups

AGENT_LOG = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\.log")
HEAD = re.compile(
    rb"^--- slurmrl: part ([0-9]{1,9}) of this output"
    rb"(?: without its first ([0-9]{1,18}) bytes)?;.*\n",
    re.M,
)
HEAD_BYTES = 64 * 1024
"""Number of bytes in which to search for the head of a part. (Other processes may have written
before the head.)"""
LEVELS = logging.getLevelNamesMapping()
SEARCHED = 1000
"""Maximum number of lines to search backward for the start of the first wanted entry."""
_ENTRY = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) \[(?P<process>[^]]+)\] (?P<level>[A-Z]+) ?"
    r"(?P<text>.*)",
    re.S,
)
_REPORTS = ("Traceback (most recent call last):", "Fatal Python error:")


@dataclass(frozen=True)
class LogFile:
    label: str
    """``trainer/0``"""
    path: Path


class Part(NamedTuple):
    """A part of a process's output.

    Long files are rotated, and the newest two parts are kept (see `workers.agent.agent_host`).
    """

    number: int
    skipped: int
    """Number of bytes at the start of the part that were dropped."""
    head_bytes: int


def head(number: int, skipped: int) -> bytes:
    """Return the first line of a part: its number and the number of dropped bytes."""
    without = f" without its first {skipped} bytes" if skipped else ""
    kept = "at most the last earlier part is kept (logging.output_mib)"
    return f"--- slurmrl: part {number} of this output{without}; {kept} ---\n".encode()


def part(data: bytes) -> Part:
    """Parse the head in the first bytes of a file. Without a head, the file is the first part."""
    found = HEAD.search(data[:HEAD_BYTES])
    if found is None:
        return Part(1, 0, 0)
    return Part(int(found[1]), int(found[2] or 0), len(found[0]) if found.start() == 0 else 0)


Attempts = Mapping[tuple[str, int], int]
"""Mapping from group and task to the number of an attempt."""


def newest(
    paths: RunPaths,
    group: str | None = None,
    task: int | None = None,
    *,
    attempts: Attempts | None = None,
) -> list[LogFile]:
    """Return the newest logs, ordered by group and task.

    These are:

    - the log of each task's newest attempt, or of its attempt in ``attempts``
    - the newest output of the trainers' batch process
    - the newest output of the batch process of another group, if none of its agents has started

    Raises UnknownNameError for a group or a task without logs if other logs exist.
    """
    groups: list[str] = []
    with suppress(FileNotFoundError):
        groups = sorted(entry.name for entry in os.scandir(paths.logs) if entry.is_dir())
    if group is not None:
        groups = [_known("group", group, groups)] if groups else []
    files = {name: _of_group(paths, name, attempts) for name in groups}
    if task is not None and any(files.values()):
        known = sorted({label.rpartition("/")[2] for of in files.values() for label in of})
        _known("task", str(task), known)
    return [
        LogFile(label, path)
        for of in files.values()
        for label, path in of.items()
        if task is None or label.endswith(f"/{task}")
    ]


def serving(paths: RunPaths, incarnation: int) -> Attempts:
    """Return the attempts of the job in which an incarnation began.

    The master's log has the same number as the log of the first agent. The logs may also cover
    other incarnations of the same job. Raises UnknownNameError.
    """
    begin = begin_of(paths.history, incarnation)
    if begin is None:
        raise UnknownNameError(f"incarnation {incarnation} has not begun; see slurmrl status")
    found = {}
    names = NameStore(paths.names)
    for attempt in published.attempts(names):
        if attempt.job == begin.data.get("job"):
            found[attempt.group, attempt.task] = attempt.attempt
    if (TRAINERS, 0) in found:
        found[MASTER, 0] = found[TRAINERS, 0]
    return found


def _of_group(paths: RunPaths, group: str, only: Attempts | None) -> dict[str, Path]:
    attempts: dict[int, int] = {}
    folder = paths.logs / group
    names = [entry.name for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
    for name in names:
        match = AGENT_LOG.fullmatch(name)
        if match:
            task, attempt = int(match[1]), int(match[2])
            if only is not None and only.get((group, task)) != attempt:
                continue
            attempts[task] = max(attempt, attempts.get(task, 0))
    found = {f"{group}/{t}": paths.log(group, t, a) for t, a in sorted(attempts.items())}
    if only is not None or (found and group != TRAINERS):
        return found
    stats = [(folder / name, (folder / name).stat()) for name in names if name.endswith(".out")]
    written = [(stat.st_mtime_ns, path) for path, stat in stats if stat.st_size]
    return {**found, **({f"{group}/batch": max(written)[1]} if written else {})}


def _known(kind: str, name: str, known: list[str]) -> str:
    if name not in known:
        raise UnknownNameError(f"no logs of {kind} '{name}'; {near(name, known)}")
    return name


class LogLine(NamedTuple):
    label: str
    """Label of the line's file, such as ``trainer/0``."""
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
    """The entries to print.

    None and 0 select everything. Only ``process`` and ``level`` exclude lines before a file's first
    entry.
    """

    process: str | None = None
    """A pattern for the process or the label of its file, such as ``rank *``."""
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
    """Reads new lines of log files, across their rotation."""

    def __init__(self, wanted: Wanted | None = None, last: int | None = None) -> None:
        """``last`` is the maximum number of lines of the first reading; None reads all.

        With ``last``, or with a time in ``wanted``, the first reading skips earlier lines.
        """
        self._wanted = wanted or Wanted()
        self._last = last
        self._begun = False
        self._read: dict[Path, tuple[int, int]] = {}
        """Number of the part, and offset in the part, up to which each file was read."""
        self._heads: dict[Path, LogLine] = {}
        """The newest line of each file."""

    def read(self, files: Sequence[LogFile], *, torn: bool) -> Iterator[LogLine]:
        """Yield new lines in the order of their entries' times.

        With ``torn``, also yield an incomplete last line. Otherwise a later call yields the line
        once it is complete.
        """
        last = None if self._begun else self._last
        if not self._begun and (last is not None or self._wanted.since):
            self._read = {file.path: _Tail(self._wanted, last, file).start() for file in files}
        self._begun = True
        each = (self._of(file, torn) for file in files)
        merged = (line for _, line in heapq.merge(*each, key=itemgetter(0)))
        yield from merged if last is None else deque(merged, maxlen=last)

    def _of(self, file: LogFile, torn: bool) -> Iterator[tuple[float, LogLine]]:
        """Yield the wanted lines of a file, each with the time by which files are merged."""
        before = self._heads.get(file.path, LogLine(file.label, None, file.label, "", "", False))
        place = before.time or 0.0
        for raw in self._new_lines(file.path, torn):
            for text in raw.decode(errors="replace").splitlines():
                line = parse(text, before)
                place = max(place, line.time or 0.0)
                before = line
                if self._wanted.takes(line):
                    yield place, line
        self._heads[file.path] = before

    def _new_lines(self, path: Path, torn: bool) -> Iterator[bytes]:
        read, offset = self._read.get(path, (0, 0))
        with documents.opened(path) as file:
            now = part(file.first(HEAD_BYTES))
            if now.number != read:
                yield from self._rotated_lines(path, now.number, read, offset)
                offset = 0
            yield from file.forward(offset, torn=torn)
            self._read[path] = now.number, file.offset

    def _rotated_lines(self, path: Path, now: int, read: int, offset: int) -> Iterator[bytes]:
        """Yield the lines of the previous part that were not read yet."""
        try:
            with documents.opened(rotated(path)) as file:
                before = part(file.first(HEAD_BYTES))
                if before.number >= now:
                    return  # during a rotation, the current file still has all lines
                start = 0  # after several rotations, the new file's head counts the lost bytes
                if before.number == read:
                    start = (
                        before.head_bytes + offset - before.skipped if before.skipped else offset
                    )
                yield from file.forward(max(start, 0), torn=True)
        except FileNotFoundError:
            return


def parse(text: str, before: LogLine) -> LogLine:
    """Return a line as part of its entry. ``before`` is the previous line in its file."""
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
    """Searches a file and its previous part backward for the start of the wanted lines."""

    def __init__(self, wanted: Wanted, last: int | None, file: LogFile) -> None:
        self._wanted = wanted
        self._last = last
        self._path = file.path
        self._nobody = LogLine(file.label, None, file.label, "", "", False)
        self._found = self._open = 0
        """Number of lines of wanted entries, and of lines of the entry that is being read
        backward."""

    def start(self) -> tuple[int, int]:
        """Return part and offset at which to begin. (0, 0) is the start of the previous part."""
        with documents.opened(self._path) as file:
            now = part(file.first(HEAD_BYTES))
            offset = self._search(file)
        if offset is not None:
            return now.number, offset
        try:
            with documents.opened(rotated(self._path)) as file:
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
            else:  # stop after very many lines without the start of an entry
                enough = self._found + self._open - SEARCHED if self._wanted.all else 0
            if self._last is not None and enough >= self._last:
                return offset
        return None


POLL_S = (0.1, 2.0)
"""First and longest pause between two searches for answers, in seconds."""


class Request:
    """A request for stacks to the running incarnation, and the files with the answers of hosts."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files
        """Mapping from ``group/task`` to an expected file that was not read yet."""

    @classmethod
    def make(cls, paths: RunPaths, incarnation: int, rank: int | None) -> Request:
        """Request the stacks of one rank of the trainers, or of all their processes.

        Raises EnvironmentFailure. Raises UsageError for an unknown rank, and CorruptFileError for a
        plan that does not name the ranks' hosts.
        """
        group = next((group for group in read_groups(paths) if group.name == TRAINERS), None)
        if group is None:
            lacks = "has no trainers" if paths.plan.exists() else "is missing"
            raise corrupt(paths.plan, lacks)
        count = group.hosts * group.workers_per_host
        if rank is not None and rank >= count:
            raise UsageError(f"no rank {rank}: the trial has ranks 0 to {count - 1}")
        tasks = range(group.hosts) if rank is None else [rank // group.workers_per_host]
        attempts = serving(paths, incarnation)
        number = _ask(paths, incarnation, rank)
        return cls(
            {
                f"{group.name}/{task}": paths.stacks(
                    group.name, task, attempts[group.name, task], incarnation, number
                )
                for task in tasks
                if (group.name, task) in attempts
            }
        )

    @property
    def missing(self) -> list[str]:
        """The hosts that have not answered."""
        return list(self._files)

    def answers(
        self, timeout_s: float, sleep: Callable[[float], None] = time.sleep
    ) -> Iterator[str]:
        """Yield the stacks as they arrive, until all have arrived or ``timeout_s`` has passed."""
        deadline = time.monotonic() + timeout_s
        backoff = Backoff(*POLL_S, sleep=sleep)
        while self._files:
            for label, path in tuple(self._files.items()):
                try:
                    text = atomic.read(path).decode(errors="replace")
                except FileNotFoundError:
                    continue
                del self._files[label]
                backoff.reset()
                yield text
            if time.monotonic() >= deadline:
                return
            if self._files:
                backoff.sleep()


def _ask(paths: RunPaths, incarnation: int, rank: int | None) -> int:
    """Publish the request and return its number."""
    ranks = None if rank is None else (rank,)
    value = json.dumps(documents.to_json(StacksRequest(ranks, time.time())))
    names = NameStore(paths.names)
    number = 1
    while True:
        try:
            names.add(keys.stacks(incarnation, number), value)
            return number
        except NameExistsError:
            number += 1
