"""Untrusted JSON documents: parsing with bounded size and depth, finite numbers, typed fields."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slurmrl.errors import SlurmrlError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.failures import REMEDY, corrupt
from slurmrl.fsio.field_types import Fields, check

MOST_DEPTH = 64
"""Levels of lists and objects; our documents have at most ten."""
MOST_DIGITS = 20
"""Digits of an integer: 64 bits and a sign."""


def parse(
    text: str | bytes,
    where: object,
    fields: Fields | None = None,
    required: Collection[str] = (),
    *,
    remedy: str = REMEDY,
) -> dict[str, Any]:
    """Parse a JSON object with these ``fields`` (see `shapes`); ``required`` ones must be there.

    Raises CorruptFileError that names ``where``.
    """
    try:
        values = _DECODER.decode(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:
        raise corrupt(where, f"is not JSON: {error}", remedy) from error
    if not isinstance(values, dict):
        raise corrupt(where, "does not hold a JSON object", remedy)
    if too_deep(values):
        raise corrupt(where, f"is nested more than {MOST_DEPTH} levels deep", remedy)
    check(values, fields or {}, where, required, remedy=remedy)
    return values


def read(
    path: Path,
    fields: Fields | None = None,
    required: Collection[str] = (),
    *,
    calls: SystemCalls = REAL,
) -> dict[str, Any]:
    """`parse` of a file. Raises FileNotFoundError, CorruptFileError, EnvironmentFailure."""
    return parse(atomic.read(path, calls=calls), path, fields, required)


@contextmanager
def expecting(where: object) -> Iterator[None]:
    """Turn errors about missing fields or wrong types in the block into CorruptFileError.

    The error names ``where``.
    """
    try:
        yield
    except SlurmrlError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise corrupt(where, f"has missing or invalid fields ({error!r})") from error


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:MOST_DIGITS]}… is too large")
    return value


def _bounded(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"the number {text[:MOST_DIGITS]}… is too long")
    return int(text)


_DECODER = json.JSONDecoder(
    parse_float=_finite, parse_int=_bounded, parse_constant=lambda constant: None
)
"""NaN and Infinity, which are not JSON but which Python writes, count as null."""


def too_deep(value: Any) -> bool:
    below = [value]
    for _ in range(MOST_DEPTH):
        inner = (one.values() if isinstance(one, dict) else one for one in below)
        below = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not below:
            return False
    return True
