"""JSON objects in files, read without trusting them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slurmrl.errors import CorruptFileError, SlurmrlError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, SystemCalls


def parse(text: str | bytes, where: object) -> dict[str, Any]:
    """Raises CorruptFileError that names ``where`` for anything but a JSON object."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{where} is not JSON: {error!r}") from error
    if not isinstance(values, dict):
        raise CorruptFileError(f"{where} does not hold a JSON object")
    return values


def read(path: Path, *, calls: SystemCalls = REAL) -> dict[str, Any]:
    """Raises FileNotFoundError, CorruptFileError, EnvironmentFailure."""
    return parse(atomic.read(path, calls=calls), path)


@contextmanager
def expecting(where: object) -> Iterator[None]:
    """What does not find its fields in here, or finds other types in them, raises
    CorruptFileError that names ``where``."""
    try:
        yield
    except SlurmrlError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CorruptFileError(f"{where} does not hold what it should: {error!r}") from error
