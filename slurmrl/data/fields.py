"""The values of a row, by keys that may be nested. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

ABSENT: Final = object()
"""The value of a key that a row does not have."""
MOST_LEVELS: Final = 8
"""Levels of nested keys that messages name."""


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """The value under ``key``, or ABSENT. A key that is not in the row is a path: ``a.b`` is
    ``row["a"]["b"]``, and a number is a place in a list."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return ABSENT
    return value


def has(row: Mapping[str, Any], key: str) -> bool:
    return value_at(row, key) is not ABSENT


def paths(row: Mapping[str, Any], prefix: str = "", levels: int = MOST_LEVELS) -> Iterator[str]:
    """The keys of a row down to so many levels, nested ones after those that contain them."""
    for key, value in row.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping) and levels > 1:
            yield from paths(value, f"{prefix}{key}.", levels - 1)
