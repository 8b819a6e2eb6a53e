"""TensorBoard's event files."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmrl.fsio import atomic
from slurmrl.run.metrics import TIME
from slurmrl.watch.sinks.feeder import Lines, numbers

FILES = "events.*"


def load() -> None:
    """Import the library."""
    import tensorboard.summary.writer.event_file_writer  # noqa: F401


class TensorBoard:
    """Writes event files in ``tensorboard/``.

    The first event of a new file has the step at which it starts. TensorBoard then drops this step
    and later steps of earlier files, which a killed process may have written incompletely.
    """

    def __init__(self, directory: Path, after: int) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = event_pb2.Event
        atomic.make_private_directory(directory)
        earlier = set(directory.glob(FILES))
        self.last = after if earlier else -1
        self._writer = EventFileWriter(str(directory))
        self._files = [path for path in directory.glob(FILES) if path not in earlier]
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(self.last + 1, time.time(), session_log=start)

    @property
    def kept(self) -> int:
        return self.last

    def log(self, lines: Lines) -> None:
        for line in lines:
            self._add(line["step"], line.get(TIME, time.time()), summary=_summary(line))
        self._writer.flush()
        for path in self._files:
            atomic.sync_file(path)
        self.last = lines[-1]["step"]

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, wall_time: float, **content: Any) -> None:
        self._writer.add_event(self._event(wall_time=wall_time, step=step, **content))


def write_arrived(directory: Path, lines: Lines) -> None:
    """Write each line into a separate file, unless the file exists.

    The names follow the order of the lines, because TensorBoard never reads an earlier file again.
    For the same reason, these files are not in the folder with the files of steps.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    atomic.make_private_directory(directory)
    there = set(atomic.list_names(directory))
    for number, line in enumerate(lines):
        name = f"events.out.tfevents.{number:010d}.step-{line['step']}"
        if name in there:
            continue
        events, at = io.BytesIO(), line.get(TIME, 0.0)
        writer = RecordWriter(events)
        writer.write(Event(wall_time=at, file_version="brain.Event:2").SerializeToString())
        event = Event(wall_time=at, step=line["step"], summary=_summary(line))
        writer.write(event.SerializeToString())
        atomic.exclusive_create(directory / name, events.getvalue())


def _summary(line: Mapping[str, Any]) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=name, simple_value=one) for name, one in numbers(line).items()]
    return Summary(value=values)
