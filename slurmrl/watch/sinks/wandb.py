"""Weights & Biases."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurmrl.config.schema import Wandb
from slurmrl.fsio import atomic
from slurmrl.run.paths import RunPaths
from slurmrl.watch.sinks.feeder import Lines, numbers, settings, uuid

HEADER_BYTES = 7
"""Size of the header of a file, and of the header before each piece of a record."""
BLOCK_BYTES = 32768
WHOLE, FIRST, LAST = 1, 2, 4
"""Kinds of pieces: a whole record, the first piece of a record and the last piece."""
ARRIVED_S = 30.0
"""Maximum number of seconds to wait for a server. A turn needs time for later sinks."""


def load() -> None:
    """Import the library."""
    import wandb.proto.wandb_internal_pb2  # noqa: F401


class WeightsAndBiases:
    """Logs all incarnations of a trial to one W&B run, identified by the trial's uuid.

    The library passes steps to a separate process, which writes its files every 15 s. A kill loses
    unwritten steps, so this sink continues after the newest step in these files; with ``mode:
    online``, after the newest step on the server.
    """

    def __init__(self, paths: RunPaths, wanted: Wandb, after: int) -> None:
        run = uuid(paths)
        held = held_by(paths.wandb, run, wanted.project, after)
        self._run = _opened(paths, wanted, run, paths.full_name)
        if wanted.mode == "online":
            held = self._run.starting_step - 1
        self.last = self.kept = held

    def log(self, lines: Lines) -> None:
        for line in lines:
            self._run.log(numbers(line), step=line["step"], commit=True)
        self.last = lines[-1]["step"]

    def close(self) -> None:
        self._run.finish()
        self.kept = self.last


def log_arrived(paths: RunPaths, wanted: Wandb, lines: Lines, held: int) -> None:
    """Log lines to a separate run in the group of the trial's run.

    The run has at least the first ``held`` lines already. The run is separate because a run accepts
    rows only in order, and these lines arrive after rows of later steps. A line's number is its
    row; its step is a metric, which charts use as x axis.
    """
    run = f"{uuid(paths)}-evaluations"
    first = held_by(paths.wandb, run, wanted.project, held - 1) + 1
    name = f"{paths.full_name} evaluations"
    opened = _opened(paths, wanted, run, name, job_type="evaluation", within_s=ARRIVED_S)
    if wanted.mode == "online":
        first = opened.starting_step
    opened.define_metric("*", step_metric="step")
    for number, line in enumerate(lines[first:], first):
        opened.log({"step": line["step"], **numbers(line)}, step=number, commit=True)
    opened.finish()


def held_by(directory: Path, run: str, project: str, after: int) -> int:
    """Return the last step of a run in the local files of a project.

    ``after`` is the last step that the files certainly had. The files may have been sent and
    removed since then. In files of another project, the step is unknown.
    """
    folders = sorted(directory.glob(f"offline-run-*-{run}"), reverse=True)
    files = [file for folder in folders for file in folder.glob("*.wandb")]
    for number, file in enumerate(files):
        own, newest = _content(file)
        if own not in (None, project):
            after = -1 if number == 0 else after
        elif newest >= 0:
            return max(after, newest)
    return after


def _opened(
    paths: RunPaths,
    wanted: Wandb,
    run: str,
    name: str,
    job_type: str | None = None,
    within_s: float | None = None,
) -> Any:
    """Open a run. ``within_s`` limits the seconds for the server; None is the library's default."""
    import wandb

    return wandb.init(
        project=wanted.project,
        name=name,
        id=run,
        group=paths.full_name,
        config=settings(paths),
        resume="allow",
        mode=wanted.mode,
        dir=str(paths.run),
        job_type=job_type,
        settings=None if within_s is None else {"init_timeout": within_s},
    )


def _content(file: Path) -> tuple[str | None, int]:
    """Return the project and the last step in a file; None and -1 if they are missing."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    record, project, newest = messages.Record(), None, -1
    for raw in records(atomic.read(file, limit_bytes=1 << 40)):
        record.ParseFromString(raw)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            project = record.run.project
        elif kind == "history":
            newest = max(newest, record.history.step.num)
    return project, newest


def records(data: bytes) -> Iterator[bytes]:
    """Yield the complete records of a file, which has LevelDB's log format after a header.

    Only the last record of a file can be incomplete.
    """
    at, whole = HEADER_BYTES, b""
    while at + HEADER_BYTES <= len(data):
        if BLOCK_BYTES - at % BLOCK_BYTES < HEADER_BYTES:  # No header fits into the block.
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        at += HEADER_BYTES
        if kind == 0 or at + length > len(data):
            return
        piece, at = data[at : at + length], at + length
        whole = piece if kind in (WHOLE, FIRST) else whole + piece
        if kind in (WHOLE, LAST):
            yield whole
