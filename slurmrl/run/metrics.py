"""``metrics.jsonl``: one JSON object per step, written by the master."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from slurmrl.errors import CorruptFileError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.documents import INTEGER, Fields

STEP_S = "time/total"
"""The metric of a step's time, including its evaluation."""
TIME = "time"
"""Key of the time at which a line was written, in seconds since the epoch by the master's clock. It
is not a result of the step. Lines of older versions lack it."""
FIELDS: Fields = {"step": INTEGER}
LATEST_BYTES = 64 << 20
"""Maximum number of bytes that `read_latest` reads from the end."""
MIXED_BYTES = 1 << 20
"""Number of bytes before the last line to keep in which `cut` searches for lines to drop."""
_EVALUATION = b'"eval/'
"""Start of the keys in lines of steps with an evaluation."""
NO_STEP = 2**60
"""A number greater than any step."""


class MetricsWriter:
    """Appends to the file.

    Each line is one write: a reader sees complete lines and perhaps an incomplete last one.
    """

    def __init__(self, path: Path) -> None:
        self._file = documents.LineWriter(path)

    def write(self, values: Mapping[str, Any]) -> None:
        """Append a line. Raises EnvironmentFailure; the write can be retried."""
        self._file.write(encode(values))

    def sync(self) -> None:
        """Flush all lines to disk, because a commit must not be newer than the metrics on disk."""
        if self._file.path.exists():
            atomic.sync_file(self._file.path)


def encode(values: Mapping[str, Any]) -> bytes:
    """Return one line. NaN and infinity, which JSON lacks, become null."""
    return json.dumps(finite(values), allow_nan=False).encode() + b"\n"


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with NaN and infinities replaced by None."""
    return {name: _finite(value) for name, value in values.items()}


def cut(path: Path, last_step: int) -> None:
    """Drop lines of steps after ``last_step`` and a torn last line.

    Call it at the start of an incarnation that continues from that step. It reads backward from the
    end, no further than needed.
    """
    try:
        with documents.opened(path) as file:
            end, mixed = _cut_at(file, last_step)
            if mixed:
                whole = file.forward()
                kept = [raw + b"\n" for raw in whole if _step(raw, path) <= last_step]
            size = file.size
    except FileNotFoundError:
        return
    if mixed:
        atomic.replace(path, b"".join(kept))
    elif end != size:
        atomic.truncate(path, end)


def _cut_at(file: documents.LineFile, last_step: int) -> tuple[int, bool]:
    """Return where the lines to keep end, and whether some lines before this place must go.

    This happens if the master of an earlier incarnation was still writing at the same time as the
    master of a later one.
    """
    end = None
    for offset, raw in file.backward() if last_step >= 0 else ():
        step = _step(raw, offset)
        if step <= last_step and end is None:
            end = offset + len(raw) + 1
        elif last_step < step < NO_STEP and end is not None:
            return end, True
        if end is not None and end - offset > MIXED_BYTES:
            break
    return end or 0, False


def read(path: Path) -> list[dict[str, Any]]:
    """Return all complete lines; none if the file does not exist yet."""
    try:
        with documents.opened(path) as file:
            return list(_parsed(file.forward(), path))
    except FileNotFoundError:
        return []


def read_latest(path: Path, n: int) -> list[dict[str, Any]]:
    """Return the last ``n`` lines, oldest first, from at most the last LATEST_BYTES."""
    try:
        with documents.opened(path) as file:
            newest = (raw for _, raw in file.backward(max(0, file.size - LATEST_BYTES)))
            return list(islice(_parsed(newest, path), n))[::-1]
    except FileNotFoundError:
        return []


def read_between(path: Path, after: int, last: int) -> list[dict[str, Any]]:
    """Return the lines of the steps after ``after`` up to ``last``, in order and each step once.

    Reads backward from the end, no further than needed.
    """
    found: dict[int, dict[str, Any]] = {}
    try:
        with documents.opened(path) as file:
            for line in _parsed((raw for _, raw in file.backward()), path):
                if line["step"] <= after:
                    break
                if line["step"] <= last:
                    found.setdefault(line["step"], line)
    except FileNotFoundError:
        return []
    return [found[step] for step in sorted(found)]


def evaluates(line: Mapping[str, Any]) -> bool:
    """Return whether a line has metrics of an evaluation."""
    return any(name.startswith("eval/") for name in line)


def read_evaluation(path: Path, n: int) -> dict[str, Any]:
    """Return the newest of the last ``n`` lines that has an evaluation; empty if none has.

    Other lines are not parsed.
    """
    try:
        with documents.opened(path) as file:
            newest = (raw for _, raw in file.backward(max(0, file.size - LATEST_BYTES)))
            evaluated = (raw for raw in islice(newest, n) if _EVALUATION in raw)
            return next(_parsed(evaluated, path), {})
    except FileNotFoundError:
        return {}


def read_values(path: Path, name: str) -> Iterator[float]:
    """Yield the numbers of one metric in the lines.

    Lines are not parsed, because a long run has very many.
    """
    value = re.compile(rb'[{ ]"%b": (-?[0-9.e+-]+)[,}]' % re.escape(name.encode()))
    try:
        with documents.opened(path) as file:
            for raw in file.forward():
                for number in value.findall(raw):
                    with suppress(ValueError):
                        yield float(number)
    except FileNotFoundError:
        return


def newest(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last line, completed by the values of the last line with an evaluation."""
    newest: dict[str, Any] = {}
    for line in lines:
        evaluated = {name: value for name, value in newest.items() if name.startswith("eval/")}
        newest = {**evaluated, **line}
    return newest


def _parsed(raw_lines: Iterable[bytes], path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines that are an object with a step.

    Skip incomplete lines in the middle of the file, which remain where later lines follow a crash.
    """
    for raw in raw_lines:
        with suppress(CorruptFileError):
            yield documents.parse(raw, path, FIELDS, FIELDS)


def _step(raw: bytes, where: object) -> int:
    """Return the step of a line; NO_STEP for a line without one."""
    try:
        step: int = documents.parse(raw, where, FIELDS, FIELDS)["step"]
    except CorruptFileError:
        return NO_STEP
    return step


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_finite(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
