"""Events of a run: one file of JSON lines per writer, merged when read.

Times are from each writer's own clock. The merged order is for people; no decision depends on it. A
killed writer may leave an incomplete last line. A later writer of the same name appends to this
line, so readers skip lines that are not events.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeAlias

from slurmrl import log
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.calls import cause
from slurmrl.fsio.documents import COUNT, INTEGER, NUMBER, SECONDS, TEXT, Fields, list_of
from slurmrl.run.paths import RunPaths

logger = log.get(__name__)

Event = dict[str, Any]
"""``time``, ``writer``, ``kind`` and the fields of the kind."""

EventKind: TypeAlias = Literal[
    "start",
    "round",
    "end",
    "topped_up",
    "surplus",
    "killed",
    "batch_host_lost",
    "warned",
    "begin",
    "join",
    "ready",
    "repeats",
    "left_out",
    "no_such_metric",
    "failure",
    "failed",
    "hang",
    "stopped",
    "server_ended",
    "sinks_behind",
    "finished",
    "commit",
    "checkpoint_failed",
    "damaged",
    "export",
    "weights",
    "weights_failed",
    "evaluation",
    "evaluation_failed",
    "task_started",
    "world_ready",
    "rollout_task",
    "retire",
    "task_silent",
    "weights_unreadable",
    "samples_damaged",
]
"""Kinds of events; docs/reference/events.md has the moment and the fields of each."""
SUFFIX = ".jsonl"
FIELDS: Fields = {
    "time": NUMBER,
    "kind": TEXT,
    "step": INTEGER,
    "seconds": SECONDS,
    "stall_s": SECONDS,
    "reason": TEXT,
    "incarnation": COUNT,
    "round": INTEGER,
    "hosts": list_of(TEXT),
    "host": TEXT,
    "cause": TEXT,
}
END_BYTES = 32 * 1024
"""Number of bytes that `read_ends` reads from each end of a long file."""


class EventWriter:
    """Appends each event to the file of a writer, such as ``master.3``, and closes the file."""

    def __init__(self, paths: RunPaths, writer: str) -> None:
        self._path = paths.event_file(writer)
        self._writer = writer

    def write(self, kind: EventKind, **data: Any) -> None:
        """Append an event. ``data`` is JSON without ``time``, ``writer`` and ``kind``."""
        event = {"time": time.time(), "writer": self._writer, "kind": kind, **data}
        try:
            self._append(json.dumps(event).encode() + b"\n")
        except EnvironmentFailure as error:  # The run continues without the line.
            logger.warning("event %s was not written: %s", kind, error)

    def _append(self, line: bytes) -> None:
        """Append to the file. Recreate its folder if it was removed, but not a removed trial."""
        try:
            atomic.append(self._path, line)
        except EnvironmentFailure as error:
            if cause(error) != errno.ENOENT:
                raise
            atomic.make_private_directory(self._path.parent, parents=False)
            atomic.append(self._path, line)


def read_all(paths: RunPaths) -> list[Event]:
    """Return all writers' events, sorted by time. Events of one writer keep their order."""
    return EventReader(paths).read()


def read_ends(paths: RunPaths, writer: str) -> list[Event]:
    """Return the first and last events of one writer, or all if the file is short."""
    path = paths.event_file(writer)
    try:
        with documents.opened(path) as file:
            if file.size <= 2 * END_BYTES:
                return _parse(file.forward(), path)
            first = _parse(file.forward(stop=END_BYTES), path)
            last = [line for _, line in file.backward(file.size - END_BYTES)]
            return first + _parse(reversed(last), path)
    except FileNotFoundError:
        return []


def read_kind(paths: RunPaths, writer: str, kind: str) -> list[Event]:
    """Return all events of one kind and one writer, in the order of the file.

    Raises EnvironmentFailure, and CorruptFileError if the file is not a regular file.
    """
    path = paths.event_file(writer)
    sought = json.dumps(kind).encode()
    try:
        with documents.opened(path) as file:
            found = _parse((line for line in file.forward() if sought in line), path)
    except FileNotFoundError:
        return []
    return [event for event in found if event["kind"] == kind]


class EventReader:
    """Reads the events that were added since its last `read`, including files of new writers."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._offsets: dict[str, int] = {}

    def read(self) -> list[Event]:
        """Return new events, sorted by time. Events of one writer keep their order.

        An incomplete line is returned once it is complete.
        """
        try:
            names = atomic.list_names(self._paths.events)
        except FileNotFoundError:
            return []
        found: list[Event] = []
        for name in names:
            if name.endswith(SUFFIX):
                found += self._new(name)
        return in_order(found)

    def _new(self, name: str) -> list[Event]:
        path = self._paths.event_file(name.removesuffix(SUFFIX))
        try:
            with documents.opened(path) as file:
                read = self._offsets.get(name, 0)
                begin = read if read <= file.size else 0  # a shorter file has replaced the old one
                found = _parse(file.forward(begin), path)
                self._offsets[name] = file.offset
        except FileNotFoundError:
            return []  # the file was deleted after it was listed
        return found


def in_order(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: float(event["time"]))


def _parse(raw_lines: Iterable[bytes], path: Path) -> list[Event]:
    """Return the events in complete lines."""
    events = []
    for raw in raw_lines:
        try:
            event = documents.parse(raw, path, FIELDS, ("time", "kind"))
        except CorruptFileError:
            continue  # a crash has torn this line
        events.append({**event, "writer": path.name.removesuffix(SUFFIX)})
    return events
