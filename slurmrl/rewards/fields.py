"""Fields of rows, also inside of objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]


def field_of(row: Row, key: str) -> Any:
    """The value under a key, or under a path with dots; None if there is none."""
    value: Any = row
    if key in row:
        return row[key]
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value
