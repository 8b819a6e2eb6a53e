"""Results of ``slurmrl eval`` for the checkpoints of a trial.

Readers of the trained trial read the results in the evaluation trials. So each result counts once,
however often its trial was interrupted, even long after training has ended. (Sinks get them from
`sinks.arrivals`.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.documents import COUNT, TEXT, Fields, table
from slurmrl.run import metrics
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import Lineage
from slurmrl.run.paths import RunPaths

HEAD: Fields = {
    "model": TEXT,
    "algorithm": table({"suite": TEXT}),
    "items": COUNT,
    "estimates": table({}),
}
REQUIRED: Final = ("model", "algorithm", "estimates")
SCORES: Final = b' "scores": ['
"""The line of a summary after which the scores of single items begin."""
_STEP: Final = re.compile(r".*-step-(\d{1,9})(?:-.*)?")
_MODEL: Final = re.compile(r"step-(\d{1,9})(?:\.(\d{1,9})-checkpoint)?")
"""Pattern of a folder's name: its step and, for a checkpoint, the incarnation that wrote it."""
_MEAN: Final = re.compile(r"avg@\d+")
"""Pattern of the mean reward; evaluations during training call it ``reward``."""
LONG: Final = 60
"""Length from which on the start of a trial's name may have been cut off (`desk.evaluating`)."""
ENDS: Final = {"value": "", "low": "/low", "high": "/high"}


class _Evaluation(NamedTuple):
    step: int
    written: float
    metrics: dict[str, float | None]


def read(paths: RunPaths) -> list[dict[str, Any]]:
    """Return lines of metrics with the evaluations of all checkpoints, by step.

    Omit damaged results, and results of checkpoints from which training did not continue.
    """
    return _read(paths, trials(paths))


def lines_of(paths: RunPaths) -> list[dict[str, Any]]:
    """Return all lines of a trial's metrics, merged with the lines of `read`."""
    return merged(metrics.read(paths.metrics), read(paths))


def newest(paths: RunPaths) -> dict[str, Any]:
    """Return the line of the newest step that has one, or {}; older lines are not read."""
    for _, same in groupby(reversed(trials(paths)), key=lambda trial: trial[0]):
        if found := _read(paths, list(same)):
            return found[-1]
    return {}


def merged(
    own: Iterable[Mapping[str, Any]], more: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Merge the lines of a trial and of `read`, by step; values of the trial take precedence."""
    found = {line["step"]: dict(line) for line in more}
    for line in own:
        found[line["step"]] = {**found.get(line["step"], {}), **line}
    return [found[step] for step in sorted(found)]


def trials(paths: RunPaths) -> list[tuple[int, RunPaths]]:
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


def _read(paths: RunPaths, trials: Iterable[tuple[int, RunPaths]]) -> list[dict[str, Any]]:
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
                found.append(_Evaluation(step, written, _metrics(head)))
        except (OSError, CorruptFileError, EnvironmentFailure):
            continue  # the evaluation has not finished or has no metrics
    found.sort(key=lambda each: each[:2])  # of two results for one step, the later one counts
    return [
        {"step": step} | {name: value for each in same for name, value in each.metrics.items()}
        for step, same in groupby(found, key=lambda each: each.step)
    ]


def checkpoint_of(paths: RunPaths, model: Path) -> re.Match[str] | None:
    """Whether a model is a checkpoint or export of the trial, even if its root has moved since."""
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


def _metrics(head: Mapping[str, Any]) -> dict[str, float | None]:
    suite = head["algorithm"].get("suite")
    prefix = f"eval/{suite}/" if suite else "eval/"
    return {
        f"{prefix}{'reward' if _MEAN.fullmatch(name) else name}{ENDS[end]}": value
        for name, estimate in head["estimates"].items()
        if isinstance(estimate, dict)
        for end, value in estimate.items()
        if end in ENDS and (value is None or isinstance(value, int | float))
    }
