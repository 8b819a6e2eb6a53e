"""The samples that a trial has kept."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmrl.desk.report.contents import Samples
from slurmrl.errors import CorruptFileError, UsageError
from slurmrl.fsio import documents, lines
from slurmrl.fsio.shapes import (
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
from slurmrl.run.samples import SamplePlace, places

MOST_ROWS = 10_000
MOST_TEXT = 6_000
"""Characters of a text."""
MOST_TOKENS = 300_000
"""Tokens with values, those of the newest samples."""
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


def read_samples(folder: Path, most: int = MOST_ROWS) -> Samples:
    """Return at most ``most`` rows: first of training, then of evaluations, marked ``evaluation``.

    If there are both, at most half of the rows are of each kind. If there are more rows, steps in
    the middle are left out evenly: the first and the newest step are kept. Long strings are cut.
    Raises EnvironmentFailure.
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
    """Return the rows of a step, None for the newest one.

    Raise UsageError with the steps on either side if it has none; EnvironmentFailure.
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
    """Return the rows, of which only the newest have values of tokens."""
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
    """Yield the rows of a step; damaged ones are left out."""
    path = place.path
    try:
        with lines.opened(path) as file:
            for raw in file.forward(place.start, place.stop):
                try:
                    yield documents.parse(raw, path, FIELDS, ("step", "prompt", "completion"))
                except CorruptFileError:
                    continue
    except FileNotFoundError:
        return


def _cut(value: Any) -> Any:
    """Return a value whose texts have at most MOST_TEXT characters."""
    if isinstance(value, str) and len(value) > MOST_TEXT:
        return f"{value[:MOST_TEXT]} … {len(value) - MOST_TEXT} more characters"
    if isinstance(value, list):
        return [_cut(one) for one in value]
    if isinstance(value, dict):
        return {key: _cut(one) for key, one in value.items()}
    return value
