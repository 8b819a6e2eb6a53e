"""``metrics.jsonl``, one JSON object per step, and results of ``slurmrl eval`` for checkpoints.

The master writes the file. Readers take the results of ``slurmrl eval`` from the directories of the
evaluation trials, so each result counts once, even if its trial was interrupted or began long after
training. `watch.sinks.arrivals` sends these results to sinks.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.documents import COUNT, INTEGER, TEXT, Fields, table
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import Lineage
from slurmrl.run.paths import RunPaths

STEP_S = "time/total"
"""Name of the metric for a step's time, including its evaluation."""
TIME = "time"
"""Key of the time at which a line was written, in seconds since the epoch by the master's clock.
Lines of older versions lack this key."""
FIELDS: Fields = {"step": INTEGER}
LATEST_BYTES = 64 << 20
"""Maximum number of bytes that `read_latest` reads from the end."""
MIXED_BYTES = 1 << 20
"""Number of bytes that `cut` searches for lines to drop, before the last line that it keeps."""
_EVALUATION = b'"eval/'
"""Start of the keys of an evaluation's metrics."""
NO_STEP = 2**60
"""A number greater than any step."""


class MetricsWriter:
    """Appends lines to ``metrics.jsonl``.

    Each line is one write, so a reader sees complete lines and perhaps an incomplete last line.
    """

    def __init__(self, path: Path) -> None:
        self._file = documents.LineWriter(path)

    def write(self, values: Mapping[str, Any]) -> None:
        """Append a line. Raises EnvironmentFailure; the write can be retried."""
        self._file.write(encode(values))

    def sync(self) -> None:
        """Flush all lines to disk. A commit must not be newer than the metrics on disk."""
        if self._file.path.exists():
            atomic.sync_file(self._file.path)


def encode(values: Mapping[str, Any]) -> bytes:
    """Return the values as one line of JSON. NaN and infinities, which JSON lacks, become null."""
    return json.dumps(finite(values), allow_nan=False).encode() + b"\n"


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with NaN and infinities replaced by None."""
    return {name: _finite(value) for name, value in values.items()}


def cut(path: Path, last_step: int) -> None:
    """Drop lines of steps after ``last_step`` and an incomplete last line.

    An incarnation that continues after ``last_step`` calls this at its start. The function reads
    backward from the end, only as far as necessary.
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
    """Return the offset at which the kept lines end, and whether to drop lines before this offset.

    Such lines exist if the masters of two incarnations wrote at the same time.
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
    """Return one line for each step after ``after`` up to ``last``, in order.

    Reads backward from the end, only as far as necessary.
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
    """Return the newest of the last ``n`` lines with an evaluation; empty without an evaluation.

    Lines without an evaluation are not parsed.
    """
    try:
        with documents.opened(path) as file:
            newest = (raw for _, raw in file.backward(max(0, file.size - LATEST_BYTES)))
            evaluated = (raw for raw in islice(newest, n) if _EVALUATION in raw)
            return next(_parsed(evaluated, path), {})
    except FileNotFoundError:
        return {}


def read_values(path: Path, name: str) -> Iterator[float]:
    """Yield the value of one metric in each line that has it.

    Search the lines without parsing, because a long run has very many lines.
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
    """Return the last line, together with the newest values of metrics of evaluations."""
    newest: dict[str, Any] = {}
    for line in lines:
        evaluated = {name: value for name, value in newest.items() if name.startswith("eval/")}
        newest = {**evaluated, **line}
    return newest


def _parsed(raw_lines: Iterable[bytes], path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines that are an object with a step.

    Skip incomplete lines, because a crash may leave such a line, and later lines may follow.
    """
    for raw in raw_lines:
        with suppress(CorruptFileError):
            yield documents.parse(raw, path, FIELDS, FIELDS)


def _step(raw: bytes, where: object) -> int:
    """Return the step of a line; NO_STEP for a line without a step."""
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


HEAD: Fields = {
    "model": TEXT,
    "algorithm": table({"suite": TEXT}),
    "items": COUNT,
    "estimates": table({}),
}
REQUIRED: Final = ("model", "algorithm", "estimates")
SCORES: Final = b' "scores": ['
"""Line of a summary after which the scores of single items begin."""
_STEP: Final = re.compile(r".*-step-(\d{1,9})(?:-.*)?")
_MODEL: Final = re.compile(r"step-(\d{1,9})(?:\.(\d{1,9})-checkpoint)?")
"""Pattern of a folder's name: its step and, for a checkpoint, the incarnation that wrote it."""
_MEAN: Final = re.compile(r"avg@\d+")
"""Pattern of the mean reward; evaluations during training call it ``reward``."""
LONG: Final = 60
"""Minimum length of a trial name whose start `desk.evaluating` may have cut off."""
ENDS: Final = {"value": "", "low": "/low", "high": "/high"}


class _Evaluation(NamedTuple):
    step: int
    written: float
    metrics: dict[str, float | None]


def read_evaluated(paths: RunPaths) -> list[dict[str, Any]]:
    """Return lines of metrics with the evaluations of all checkpoints, ordered by step.

    Omit damaged results and results of checkpoints that were rolled back.
    """
    return _evaluations_of(paths, evaluation_trials(paths))


def all_lines(paths: RunPaths) -> list[dict[str, Any]]:
    """Return all lines of a trial's metrics, merged with the lines of `read_evaluated`."""
    return with_evaluated(read(paths.metrics), read_evaluated(paths))


def newest_evaluated(paths: RunPaths) -> dict[str, Any]:
    """Return the last line of `read_evaluated`, with only its newest results; {} without any."""
    for _, same in groupby(reversed(evaluation_trials(paths)), key=lambda trial: trial[0]):
        if found := _evaluations_of(paths, list(same)):
            return found[-1]
    return {}


def with_evaluated(
    own: Iterable[Mapping[str, Any]], more: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Merge each step's lines of a trial and of `read_evaluated`; return them sorted by step.

    Values of the trial take precedence.
    """
    found = {line["step"]: dict(line) for line in more}
    for line in own:
        found[line["step"]] = {**found.get(line["step"], {}), **line}
    return [found[step] for step in sorted(found)]


def evaluation_trials(paths: RunPaths) -> list[tuple[int, RunPaths]]:
    """Return the trials that may have evaluated a checkpoint, with its step, ordered by step."""
    folder = paths.evaluated()
    try:
        names = atomic.list_names(folder)
    except (FileNotFoundError, EnvironmentFailure):
        return []
    first = f"{paths.experiment}-{paths.trial}-step-"
    own = (name for name in names if name.startswith(first) or len(name) >= LONG)
    matches = ((_STEP.fullmatch(name), name) for name in own)
    return sorted(
        ((int(match[1]), RunPaths(folder / name)) for match, name in matches if match),
        key=lambda trial: (trial[0], trial[1].trial),
    )


def _evaluations_of(
    paths: RunPaths, trials: Iterable[tuple[int, RunPaths]]
) -> list[dict[str, Any]]:
    lineage: Lineage | None = None
    found: list[_Evaluation] = []
    for _, trial in trials:
        try:
            head = _head(trial.summary)
            match = checkpoint_of(paths, Path(head["model"]))
            if match is None:
                continue
            lineage = lineage or Lineage.of(History(paths.history).read())
            step, incarnation = int(match[1]), match[2]
            if incarnation is None or lineage.has(step, int(incarnation)):
                written = trial.summary.stat().st_mtime
                found.append(_Evaluation(step, written, _estimates(head)))
        except (OSError, CorruptFileError, EnvironmentFailure):
            continue  # the evaluation has not finished or has no metrics
    found.sort(key=lambda each: each[:2])  # a step's later result wins
    return [
        {"step": step} | {name: value for each in same for name, value in each.metrics.items()}
        for step, same in groupby(found, key=lambda each: each.step)
    ]


def checkpoint_of(paths: RunPaths, model: Path) -> re.Match[str] | None:
    """Match the name of a model folder if it is a checkpoint or export of the trial.

    Only the end of the path counts, because the root of the runs may have moved since.
    """
    folders = (paths.exports.name, paths.being_evaluated.name)
    own = model.parts[-4:-2] == (paths.experiment, paths.trial) and model.parts[-2] in folders
    return _MODEL.fullmatch(model.name) if own else None


def _head(summary: Path) -> dict[str, Any]:
    """Return a summary without its scores, which may be very many."""
    with documents.opened(summary) as file:
        parts: list[bytes] = []
        for raw in file.forward():
            if raw == SCORES:
                break
            parts.append(raw)
    text = b"\n".join(parts).removesuffix(b",") + b"}"
    return documents.parse(text, summary, HEAD, REQUIRED)


def _estimates(head: Mapping[str, Any]) -> dict[str, float | None]:
    suite = head["algorithm"].get("suite")
    prefix = f"eval/{suite}/" if suite else "eval/"
    return {
        f"{prefix}{'reward' if _MEAN.fullmatch(name) else name}{ENDS[end]}": value
        for name, estimate in head["estimates"].items()
        if isinstance(estimate, dict)
        for end, value in estimate.items()
        if end in ENDS and (value is None or isinstance(value, int | float))
    }
