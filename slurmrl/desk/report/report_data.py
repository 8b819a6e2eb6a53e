"""The contents of a trial's report, which become JSON: curves of metrics, samples, comparisons."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmrl.errors import CorruptFileError, UsageError
from slurmrl.fsio import documents
from slurmrl.fsio.documents import (
    INTEGER,
    NUMBER,
    SIZE,
    TEXT,
    Fields,
    FieldType,
    each,
    list_of,
    table,
)
from slurmrl.run.metrics import TIME
from slurmrl.run.samples import SamplePlace, places

MOST_POINTS = 4000
"""Maximum number of points of a curve; a screen has fewer columns."""
DIGITS = 7
LARGEST = 1e300
"""Largest number in a curve. Curves omit larger numbers and infinities: differences overflow."""
PLACES = ("step", TIME)
"""Keys for the position of a line on the x axis; all other keys are metrics."""
MOST_ROWS = 10_000
MOST_TEXT = 6_000
"""Maximum number of characters of a string."""
MOST_TOKENS = 300_000
"""Maximum number of tokens for which a report has values: tokens of the newest samples."""
VALUES = FieldType(
    "a list of numbers and nulls",
    lambda value: (
        isinstance(value, list) and all(one is None or NUMBER.accepts(one) for one in value)
    ),
)
FIELDS: Fields = {
    "parts": each(NUMBER),
    "tokens": list_of(TEXT),
    "left_out": SIZE,
    "values": table({"masked": VALUES, "advantages": VALUES, "logprobs": VALUES}),
    "versions": table({"names": list_of(TEXT), "drawn_by": VALUES}, ("names", "drawn_by")),
    "step": INTEGER,
    "id": TEXT,
    "index": INTEGER,
    "prompt": TEXT,
    "rendered": TEXT,
    "completion": TEXT,
    "reward": NUMBER,
    "turns": list_of(table({"wrote": TEXT, "read": TEXT})),
}
OF_TOKENS = ("tokens", "left_out", "values", "versions")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The values of one metric. A missing value is None."""

    x: Sequence[int]
    """Steps."""
    y: Sequence[float | None]


@dataclass(frozen=True, kw_only=True)
class CallTime:
    """Mean duration of a call in a step."""

    name: str
    ranks: Sequence[int]
    """The ranks that run the call; empty if the plan does not say."""
    seconds: float
    """Mean of the newest steps."""
    predicted_s: float | None = None
    """Predicted seconds for the lengths of these steps; None for unknown hardware."""
    flops: float | None = None
    """Floating-point operations of all ranks: the plan's number, scaled to the measured tokens."""


@dataclass(frozen=True, kw_only=True)
class TaskSpan:
    """The working time of one attempt of a rollout task.

    Times are seconds since the epoch, by the master's clock.
    """

    task: str
    attempt: int
    host: str
    began: float
    ended: float | None
    """End of the attempt; None if no event reports it."""
    how: str
    """Description of the end."""


@dataclass(frozen=True, kw_only=True)
class CommitRow:
    step: int
    directory: str
    incarnation: int
    time: float
    """Seconds since the epoch."""
    bytes: int | None
    """Size; None if the manifest cannot be read or the commit was deleted."""
    seconds: float | None
    """Seconds that the commit took."""
    stall_s: float | None
    """Seconds that training waited for the commit."""
    deleted: bool
    exported: bool


@dataclass(frozen=True, kw_only=True)
class Samples:
    rows: Sequence[Mapping[str, Any]]
    """Lines of ``samples/``, sorted by step, then lines of evaluations (``evaluation: true``)."""
    steps: int
    """Number of steps and evaluations with samples."""
    shown: int
    """Number of the steps and evaluations that ``rows`` covers."""


@dataclass(frozen=True, kw_only=True)
class TrialReport:
    name: str
    status: Mapping[str, Any]
    """The object of ``slurmrl status --json`` (`watch.status`)."""
    lines: int
    """Number of lines of metrics."""
    curves: Mapping[str, Curve]
    calls: Sequence[CallTime]
    predictions: str
    """Origin of the predicted seconds, or the reason why there are none."""
    step_s: float | None
    """Mean seconds of the newest steps."""
    tokens_per_s: float | None
    timeline: Sequence[Mapping[str, Any]]
    """The newest steps with ``step`` and ``calls``. A call has its ``name`` and ``ranks``, which
    are (rank, begin in seconds since the epoch, seconds)."""
    peaks: Sequence[Sequence[int]]
    """Pairs (rank, maximum bytes of GPU memory that the rank has used)."""
    planned: Mapping[str, Any]
    """The plan's figures (`plan.plan_values.figures`); empty if there are none."""
    tasks: Sequence[TaskSpan]
    rollouts: Mapping[str, Any] | None
    """Last report of the newest master about rollout tasks (`run.reports`)."""
    commits: Sequence[CommitRow]
    samples: Samples
    config: str
    """The resolved configuration as YAML."""
    settings: Mapping[str, Any]
    """The resolved configuration, with dotted keys."""
    environment: Mapping[str, Any]
    """The record of the newest code snapshot: versions, packages, git."""
    diffs: Mapping[str, str]
    """Mapping from a repository to its uncommitted changes."""


def curves(lines: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return the curve of each metric, in the order of first appearance."""
    found: dict[str, tuple[list[int], list[float | None]]] = {}
    for line in lines:
        for name, value in line.items():
            if name not in PLACES and (value is None or _is_number(value)):
                steps, values = found.setdefault(name, ([], []))
                steps.append(line["step"])
                known = value is not None and abs(value) <= LARGEST
                values.append(float(f"{value:.{DIGITS}g}") if known else None)
    return {
        name: Curve(x=steps, y=values)
        for name, (steps, values) in found.items()
        if any(value is not None for value in values)
    }


def smoothed(values: Iterable[float | None], factor: float) -> list[float | None]:
    """Return the exponential moving averages; ``factor``, below 1, is the weight of the past.

    The first values have no bias towards zero.
    """
    mean = weight = 0.0
    found: list[float | None] = []
    for value in values:
        if value is not None:
            weight = factor * weight + (1 - factor)
            mean += (value - mean) * ((1 - factor) / weight)  # A constant must not drift.
        found.append(None if value is None else mean)
    return found


def thinned(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """Return a curve of at most ``most`` points.

    Keep the minimum and the maximum of each range of a longer curve, so that no peak is lost.
    """
    x, y = curve.x, curve.y
    if len(x) <= most:
        return curve
    ranges = most // 2
    kept: list[int] = []
    for number in range(ranges):
        places = range(number * len(x) // ranges, (number + 1) * len(x) // ranges)
        known = [(value, place) for place in places if (value := y[place]) is not None]
        kept += sorted({min(known)[1], max(known)[1]}) if known else [places[0]]
    return Curve(x=[x[place] for place in kept], y=[y[place] for place in kept])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_samples(folder: Path, most: int = MOST_ROWS) -> Samples:
    """Return up to ``most`` rows: of training, then of evaluations, marked as ``evaluation``.

    If both kinds exist, each gets at most half of the rows. If there are too many rows, steps are
    omitted evenly, except for the first and the newest. Long strings are cut. Raises
    EnvironmentFailure.
    """
    training, evaluations = (
        list(places(folder, evaluation=evaluation).values()) for evaluation in (False, True)
    )
    if training and evaluations:
        most //= 2
    rows, steps = _some(training, most)
    more, evaluated = _some(evaluations, most)
    return Samples(
        rows=_with_values([*rows, *({**row, "evaluation": True} for row in more)]),
        steps=len(training) + len(evaluations),
        shown=steps + evaluated,
    )


def of_step(folder: Path, step: int | None, *, evaluation: bool) -> list[Mapping[str, Any]]:
    """Return the rows of a step; None selects the newest step with rows.

    Raises EnvironmentFailure, and UsageError with the nearest steps if the step has no rows.
    """
    found = places(folder, evaluation=evaluation)
    steps = list(found)
    kind = "evaluation" if evaluation else "training"
    if not steps:
        raise UsageError(f"{folder}: no samples of {kind} yet (logging.samples)")
    chosen = steps[-1] if step is None else step
    if chosen not in found:
        place = bisect(steps, chosen)
        near = " and ".join(str(one) for one in steps[max(place - 1, 0) : place + 1])
        raise UsageError(f"step {chosen} has no samples of {kind}; the nearest: {near}")
    return list(_rows(found[chosen]))


def _some(steps: list[SamplePlace], most: int) -> tuple[list[Mapping[str, Any]], int]:
    """Return at most ``most`` rows of steps, and the number of steps that they cover."""
    if not steps:
        return [], 0
    of_step = max(len(list(_rows(steps[-1]))), 1)
    chosen = _spread(steps, max(most // of_step, 2))
    return [_cut(row) for place in chosen for row in _rows(place)][-most:], len(chosen)


def _with_values(rows: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows; remove the values of tokens from all except the newest rows."""
    left, found = MOST_TOKENS, []
    for row in reversed(rows):
        left -= len(row.get("tokens") or ())
        plain = {key: value for key, value in row.items() if key not in OF_TOKENS}
        found.append(row if left >= 0 else plain)
    return found[::-1]


def _spread(steps: list[SamplePlace], most: int) -> list[SamplePlace]:
    if len(steps) <= most:
        return steps
    last = len(steps) - 1
    return [steps[number * last // (most - 1)] for number in range(most)]


def _rows(place: SamplePlace) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a step. Skip damaged rows."""
    path = place.path
    try:
        with documents.opened(path) as file:
            for raw in file.forward(place.start, place.stop):
                try:
                    yield documents.parse(raw, path, FIELDS, ("step", "prompt", "completion"))
                except CorruptFileError:
                    continue
    except FileNotFoundError:
        return


def _cut(value: Any) -> Any:
    """Return a value whose strings have at most MOST_TEXT characters."""
    if isinstance(value, str) and len(value) > MOST_TEXT:
        return f"{value[:MOST_TEXT]} … {len(value) - MOST_TEXT} more characters"
    if isinstance(value, list):
        return [_cut(one) for one in value]
    if isinstance(value, dict):
        return {key: _cut(one) for key, one in value.items()}
    return value


@dataclass(frozen=True)
class Point:
    step: int
    value: float


@dataclass(frozen=True)
class Extent:
    """Selected values of a metric in one trial."""

    common: Point | None
    """The point at the last step for which both trials have a value; None without such a step."""
    last: Point
    least: Point
    greatest: Point

    @property
    def is_constant(self) -> bool:
        return self.least.value == self.greatest.value


@dataclass(frozen=True)
class Comparison:
    settings: Mapping[str, list[Any]]
    """The two values of each dotted key in which the trials differ (`collecting.differences`)."""
    metrics: Mapping[str, tuple[Extent, Extent]]
    """Metrics that both trials have."""


def shared(one: Mapping[str, Curve], two: Mapping[str, Curve]) -> dict[str, tuple[Extent, Extent]]:
    """Return the extents of the metrics that both trials have, in the order of the first trial."""
    return {name: _pair(one[name], two[name]) for name in one if name in two}


def _pair(one: Curve, two: Curve) -> tuple[Extent, Extent]:
    steps = {point.step for point in _points(one)} & {point.step for point in _points(two)}
    common = max(steps, default=None)
    return extent(one, common), extent(two, common)


def _points(curve: Curve) -> list[Point]:
    return [Point(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y is not None]


def extent(curve: Curve, common: int | None) -> Extent:
    """Return the extent of a curve with at least one value.

    ``common`` is the last step for which both trials have a value. Among equal values, the first is
    the minimum or the maximum.
    """
    points = _points(curve)
    return Extent(
        common=next((point for point in reversed(points) if point.step == common), None),
        last=points[-1],
        least=min(points, key=lambda point: point.value),
        greatest=max(points, key=lambda point: point.value),
    )
