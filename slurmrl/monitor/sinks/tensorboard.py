"""TensorBoard's event files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from slurmrl.fsio import atomic
from slurmrl.monitor.metrics import TIME
from slurmrl.monitor.sinks.base import Lines, numbers


class TensorBoard:
    """Writes event files in ``tensorboard/``. The first event of a new file says at which step it
    starts, and TensorBoard drops that step and later ones from earlier files: those were handed
    over, perhaps in part, by a process that was killed."""

    def __init__(self, directory: Path, after: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        atomic.make_private_directory(directory)
        earlier = set(directory.iterdir())
        self.last = after if earlier else -1
        self._writer = EventFileWriter(str(directory))
        self._files = [path for path in directory.iterdir() if path not in earlier]
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(self.last + 1, time.time(), session_log=start)

    @property
    def kept(self) -> int:
        return self.last

    def log(self, lines: Lines) -> None:
        value = self._summary.Value
        for line in lines:
            scalars = [value(tag=name, simple_value=one) for name, one in numbers(line).items()]
            at = line.get(TIME, time.time())
            self._add(line["step"], at, summary=self._summary(value=scalars))
        self._writer.flush()
        for path in self._files:
            atomic.sync_file(path)
        self.last = lines[-1]["step"]

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, wall_time: float, **content: Any) -> None:
        self._writer.add_event(self._event(wall_time=wall_time, step=step, **content))
