"""Lazy tables of implementations: a name maps to ``"module:attribute"``, imported on use."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from slurmrl.errors import UnknownNameError, UnreadableInputError, UsageError


def resolve(reference: str) -> Any:
    """Import ``"package.module:attribute"`` and return the attribute."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


def import_own(what: str, reference: str) -> Any:
    """The attribute that a user names as ``module:attribute``; ``what`` names its kind in messages.
    Exceptions raised inside the module propagate.

    :raises UsageError: the module has no such attribute, or is not Python.
    :raises UnreadableInputError: the module cannot be imported.
    """
    module_name, _, name = reference.partition(":")
    importlib.invalidate_caches()  # a listing may have been cached while the folder was unreadable
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        missing = error.name is not None and f"{module_name}.".startswith(f"{error.name}.")
        gone = isinstance(error, ModuleNotFoundError) and missing
        why = f"there is no module '{error.name}'" if gone else f"{module_name}: {error}"
        raise UnreadableInputError(f"{what} '{reference}': {why}") from error
    except OSError as error:
        if error.filename is None:
            raise
        raise UnreadableInputError(f"{what} '{reference}': {module_name}: {error}") from error
    except SyntaxError as error:
        raise UsageError(f"{what} '{reference}': {error}") from error
    if not hasattr(module, name):
        public = sorted(attribute for attribute in vars(module) if not attribute.startswith("_"))
        hint = near(name, public)
        raise UsageError(f"{what} '{reference}': {module_name} has no '{name}'; {hint}")
    return getattr(module, name)


def near(name: str, known: list[str], likeness: float = 0.6) -> str:
    """Return a hint for a misspelt name: the closest match of at least this ``likeness`` (0 to 1),
    if any, and the whole list."""
    import difflib  # only for errors: it takes a while

    close = difflib.get_close_matches(name, known, n=1, cutoff=likeness)
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
