"""``metrics.jsonl``: one JSON object a step, written by the master, read by everybody."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
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
        self._torn = False
        """The last write failed, perhaps in the middle of its line."""

    def write(self, values: Mapping[str, Any]) -> None:
        """Raises EnvironmentFailure, after which it can be tried again."""
        line = encode(values)
        data = b"\n" + line if self._torn else line
        self._torn = True
        atomic.append(self._path, data)
        self._torn = False

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
    kept = b"".join(encode(line) for line in _lines(_whole(old)) if line["step"] <= last_step)
    if kept != old:
        atomic.replace(path, kept)


def read(path: Path) -> list[dict[str, Any]]:
    """All lines; a torn last one and a missing file count as not written yet."""
    try:
        return list(_lines(_whole(path.read_bytes())))
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
                lines = list(islice(_lines(reversed(_whole(data))), n))
                if len(lines) == n or not start:
                    return lines[::-1]
                want *= 2
    except FileNotFoundError:
        return []


def newest(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The last of some lines, with the values of the last evaluation among them."""
    newest: dict[str, Any] = {}
    for line in lines:
        evaluated = {name: value for name, value in newest.items() if name.startswith("eval/")}
        newest = {**evaluated, **line}
    return newest


def _whole(data: bytes) -> list[bytes]:
    """The lines that have an end."""
    return data.split(b"\n")[:-1]


def _lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The lines that hold an object with a step. What a crash left in the middle of the file (a
    torn line that a later one was appended to) is passed over."""
    for raw in lines:
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            yield line


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
