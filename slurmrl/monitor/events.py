"""What happened in a run: one file of JSON lines per writer, merged when read.

Times are each writer's own clock; merged they are for people to read, nothing is decided by them.
"""

from __future__ import annotations

import json
import time
from typing import Any

from slurmrl.errors import CorruptFileError
from slurmrl.fsio import atomic, documents
from slurmrl.paths import RunPaths


class EventWriter:
    """Appends to the file of one writer, such as ``master.3``; closed after every event."""

    def __init__(self, paths: RunPaths, writer: str) -> None:
        self._path = paths.event_file(writer)
        self._writer = writer

    def write(self, kind: str, **data: Any) -> None:
        """``data`` is JSON; it cannot have the keys ``time``, ``writer`` and ``kind``."""
        event = {"time": time.time(), "writer": self._writer, "kind": kind, **data}
        atomic.append(self._path, json.dumps(event).encode() + b"\n")


def read_all(paths: RunPaths) -> list[dict[str, Any]]:
    """All writers' events by time; those of one writer keep their order."""
    events = []
    for file in sorted(paths.events.glob("*.jsonl")):
        for raw in file.read_bytes().split(b"\n")[:-1]:
            try:
                event = documents.parse(raw, file)
            except CorruptFileError:
                continue  # torn by a crash
            if isinstance(event.get("time"), int | float):
                events.append(event)
    return sorted(events, key=lambda event: float(event["time"]))
