"""``metrics.jsonl``: one JSON object a step, written by the master, read by everybody."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmrl.fsio import atomic

TAIL_BYTES = 64 * 1024
"""What `read_latest` reads from the end at first; doubled until it holds enough lines."""


class MetricsWriter:
    """Appends to the file and closes it after each line, so that other hosts see it. Each line is
    one write: a reader sees whole lines, or a torn last one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, values: Mapping[str, Any]) -> None:
        atomic.append(self._path, encode(values))

    def sync(self) -> None:
        """Wait until all lines are on disk: a commit must not be ahead of its metrics."""
        if self._path.exists():
            atomic.sync_file(self._path)


def encode(values: Mapping[str, Any]) -> bytes:
    """One line. JSON has no NaN and no infinity: they become null."""
    finite = {name: None if _not_finite(value) else value for name, value in values.items()}
    return json.dumps(finite, allow_nan=False).encode() + b"\n"


def cut(path: Path, last_step: int) -> None:
    """Drop lines of steps after ``last_step`` and a torn last line, at the begin of an
    incarnation that goes on from that step."""
    try:
        old = atomic.read(path)
    except FileNotFoundError:
        return
    kept = b"".join(encode(line) for line in _lines(old) if line["step"] <= last_step)
    if kept != old:
        atomic.replace(path, kept)


def read(path: Path) -> list[dict[str, Any]]:
    """All lines; a torn last one and a missing file count as not written yet."""
    try:
        return list(_lines(path.read_bytes()))
    except FileNotFoundError:
        return []


def read_latest(path: Path, n: int) -> list[dict[str, Any]]:
    """The last ``n`` lines, oldest first; reads only as much of the file's end as that takes."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            want = TAIL_BYTES
            while True:
                start = max(0, size - want)
                file.seek(start)
                data = file.read(size - start)
                if start:
                    data = data.partition(b"\n")[2]
                lines = list(_lines(data))
                if len(lines) >= n or not start:
                    return lines[-n:] if n else []
                want *= 2
    except FileNotFoundError:
        return []


def latest(path: Path, lines: int = 200) -> dict[str, Any]:
    """The newest line, with the newest evaluation's values where that line has none itself.

    An evaluation further back than ``lines`` lines is not looked for.
    """
    newest: dict[str, Any] = {}
    for line in read_latest(path, lines):
        evaluated = {name: value for name, value in newest.items() if name.startswith("eval/")}
        newest = {**evaluated, **line}
    return newest


def _lines(data: bytes) -> Iterator[dict[str, Any]]:
    """Whole lines that hold an object with a step. What a crash left in the middle of the file
    (a torn line that a later one was appended to) is passed over."""
    for raw in data.split(b"\n")[:-1]:
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            yield line


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
