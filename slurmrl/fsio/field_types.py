"""Types of JSON fields, and the check of an object against them.

Every reader of a document checks it once and can rely on its fields afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from slurmrl.fsio.failures import REMEDY, corrupt

SHOWN_CHARACTERS = 80
FILE_NAME_BYTES = 255
"""The longest file name that Linux file systems take."""


@dataclass(frozen=True)
class FieldType:
    """The values that a field may hold."""

    expected: str
    """``a number``"""
    accepts: Callable[[Any], bool]


Fields = Mapping[str, FieldType]
"""Types by field name. Other fields are allowed; a null field counts as missing."""


def _integer(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _number(value: Any, least: float, most: float) -> bool:
    return type(value) in (int, float) and least <= value <= most


def _file_name(value: Any) -> bool:
    if not isinstance(value, str) or value in ("", ".", "..") or set("/\0") & set(value):
        return False
    try:
        return len(os.fsencode(value)) <= FILE_NAME_BYTES
    except UnicodeEncodeError:  # a lone surrogate
        return False


MOST_COUNT = 10**7
"""Larger than any number of hosts, ranks or array elements, and small enough to loop over."""
LONGEST_S = 1e11
"""3,000 years, as a span and since the epoch."""

INTEGER = FieldType("a whole number", lambda value: _integer(value, -(2**53), 2**53))
COUNT = FieldType(f"a whole number from 0 to {MOST_COUNT}", lambda v: _integer(v, 0, MOST_COUNT))
SIZE = FieldType("a whole number that is not negative", lambda value: _integer(value, 0, 2**63))
NUMBER = FieldType("a number", lambda value: _number(value, -1e300, 1e300))
SECONDS = FieldType("a number of seconds", lambda value: _number(value, -LONGEST_S, LONGEST_S))
TEXT = FieldType("a text", lambda value: isinstance(value, str))
FLAG = FieldType("true or false", lambda value: isinstance(value, bool))
FILE_NAME = FieldType("the name of a file or directory", _file_name)


def one_of(*values: str) -> FieldType:
    return FieldType(f"one of {', '.join(values)}", lambda value: value in values)


def list_of(kind: FieldType) -> FieldType:
    def accepts(value: Any) -> bool:
        return isinstance(value, list) and all(map(kind.accepts, value))

    return FieldType(f"a list, each item {kind.expected}", accepts)


def items(*kinds: FieldType) -> FieldType:
    """A list of fixed length."""

    def accepts(value: Any) -> bool:
        return (
            isinstance(value, list)
            and len(value) == len(kinds)
            and all(kind.accepts(item) for kind, item in zip(kinds, value, strict=True))
        )

    return FieldType(f"a list of {', '.join(kind.expected for kind in kinds)}", accepts)


def table(fields: Fields, required: Collection[str] = ()) -> FieldType:
    """An object with these fields."""

    def accepts(value: Any) -> bool:
        return isinstance(value, dict) and wrong(value, fields, required) is None

    return FieldType(f"an object with {', '.join(fields)}", accepts)


def each(kind: FieldType) -> FieldType:
    """An object with any keys whose values have one type."""

    def accepts(value: Any) -> bool:
        return isinstance(value, dict) and all(map(kind.accepts, value.values()))

    return FieldType(f"an object, each value {kind.expected}", accepts)


def wrong(values: Mapping[str, Any], fields: Fields, required: Collection[str] = ()) -> str | None:
    """Describe the first invalid field; None if all are valid."""
    for name, kind in fields.items():
        value = values.get(name)
        if value is None:
            if name in required:
                return f"has no '{name}' ({kind.expected})"
        elif not kind.accepts(value):
            return f"has {shown(value)} in '{name}', expected {kind.expected}"
    return None


def check(
    values: Mapping[str, Any],
    fields: Fields,
    where: object,
    required: Collection[str] = (),
    *,
    remedy: str = REMEDY,
) -> None:
    """Check the fields. Raises CorruptFileError that names ``where`` and the field."""
    problem = wrong(values, fields, required)
    if problem is not None:
        raise corrupt(where, problem, remedy)


def shown(value: Any) -> str:
    """Return a value as it appears in messages, which it must not fill."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
