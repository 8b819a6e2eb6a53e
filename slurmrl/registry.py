"""Lazy tables of implementations: a name maps to ``"module:attribute"``, imported on use."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator
from typing import Any

from slurmrl.errors import UnknownNameError


def resolve(reference: str) -> Any:
    """Import ``"package.module:attribute"`` and return the attribute."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


def near(name: str, known: list[str]) -> str:
    """Return a hint for a misspelt name: the closest match, if any, and the whole list."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}allowed: {', '.join(known)}"


class Registry:
    """The implementations of one kind. Unknown names raise and list the known ones; registering a
    name twice raises too."""

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def register(self, name: str, reference: str) -> None:
        if name in self._entries:
            raise ValueError(f"{self.kind} '{name}' is registered already: {self._entries[name]}")
        self._entries[name] = reference

    def reference(self, name: str) -> str:
        """Return the ``module:attribute`` of a name. Raises UnknownNameError."""
        if name not in self._entries:
            raise UnknownNameError(f"unknown {self.kind} '{name}'; {near(name, sorted(self))}")
        return self._entries[name]

    def load(self, name: str) -> Any:
        return resolve(self.reference(name))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
