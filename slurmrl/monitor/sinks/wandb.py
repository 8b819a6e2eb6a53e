"""Weights & Biases."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurmrl.config.schema import Wandb
from slurmrl.fsio import atomic
from slurmrl.monitor.sinks.base import Lines, numbers
from slurmrl.monitor.sinks.settings import settings, uuid
from slurmrl.paths import RunPaths

HEADER_BYTES = 7
"""Before the first block of a file, and before each piece of a record."""
BLOCK_BYTES = 32768
WHOLE, FIRST, LAST = 1, 2, 4
"""Kinds of pieces: the whole record, its first and its last one."""


class WeightsAndBiases:
    """Logs all incarnations of a trial to one W&B run, identified by the trial's uuid.

    The library hands steps to a process of its own, which writes its files every 15 s. A kill loses
    what it had not written, so the steps that its files hold say where to continue; with
    ``mode: online``, those that the server has."""

    def __init__(self, paths: RunPaths, wanted: Wandb, after: int) -> None:
        import wandb

        held = max(after, newest_step(paths.wandb))
        self._run = wandb.init(
            project=wanted.project,
            name=f"{paths.experiment}/{paths.trial}",
            id=uuid(paths),
            config=settings(paths),
            resume="allow",
            mode=wanted.mode,
            dir=str(paths.run),
        )
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


def newest_step(directory: Path) -> int:
    """The last step in the files of the library's newest offline run that holds one; -1 if none."""
    for run in sorted(directory.glob("offline-run-*"), reverse=True):
        for file in run.glob("*.wandb"):
            if steps := list(_steps(file)):
                return max(steps)
    return -1


def _steps(file: Path) -> Iterator[int]:
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    record = messages.Record()
    for raw in records(atomic.read(file, limit_bytes=1 << 40)):
        record.ParseFromString(raw)
        if record.WhichOneof("record_type") == "history":
            yield record.history.step.num


def records(data: bytes) -> Iterator[bytes]:
    """The complete records of a file: LevelDB's log format behind a header. What follows a torn
    one was never written."""
    at, whole = HEADER_BYTES, b""
    while at + HEADER_BYTES <= len(data):
        if BLOCK_BYTES - at % BLOCK_BYTES < HEADER_BYTES:  # no header fits into the block's rest
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
