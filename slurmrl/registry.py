"""Lazy tables of implementations: a name maps to ``"module:attribute"``, imported on use."""

from __future__ import annotations

import importlib
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmrl.errors import SlurmrlError, UnknownNameError, UnreadableInputError, UsageError

FAULTS = (NameError, AttributeError, TypeError, LookupError, ValueError, ArithmeticError)
"""Errors that a module with a fault raises at every import."""
SHOWN = 60  # maximum number of names in a message


def resolve(reference: str) -> Any:
    """Import ``"package.module:attribute"`` and return the attribute."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


def import_own(what: str, reference: str) -> Any:
    """Return the user's ``module:attribute``; ``what`` names its kind in messages.

    Other exceptions that the module raises propagate.

    Raises:
        UsageError: The module lacks the attribute, raised one of FAULTS, or is not Python.
        UnreadableInputError: The module cannot be imported.
    """
    module_name, _, name = reference.partition(":")
    importlib.invalidate_caches()  # Drop empty listings that were cached on read errors.
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        missing = error.name is not None and f"{module_name}.".startswith(f"{error.name}.")
        gone = isinstance(error, ModuleNotFoundError) and missing
        why = f"there is no module '{error.name}'" if gone else f"{module_name}: {_import(error)}"
        raise UnreadableInputError(f"{what} '{reference}': {why}") from error
    except OSError as error:
        if error.filename is None:
            raise
        raise UnreadableInputError(f"{what} '{reference}': {module_name}: {error}") from error
    except SyntaxError as error:
        raise UsageError(f"{what} '{reference}': {error}") from error
    except SlurmrlError:
        raise
    except FAULTS as error:
        raise UsageError(f"{what} '{reference}': {describe(error)}") from error
    if not hasattr(module, name):
        found = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        own = [key for key, one in found.items() if getattr(one, "__module__", 0) == module_name]
        hint = near(name, sorted(own or found))
        raise UsageError(f"{what} '{reference}': {module_name} has no '{name}'; {hint}")
    return getattr(module, name)


def construct(what: str, name: str, kind: type, options: Mapping[str, Any]) -> Any:
    """Return an object of a class of kind ``what``. Raises UsageError for unsuitable options."""
    try:
        return kind(**options)
    except TypeError as error:
        raise UsageError(f"{what} '{name}' with options {dict(options)}: {error}") from error


def describe(error: BaseException) -> str:
    """Return the error and the last line of the user's code that led to it.

    Example: ``KeyError: 'x' (my_rewards.py:12)``.
    """
    return f"{type(error).__name__}: {error}{_line_of(error)}"


def _import(error: ImportError) -> str:
    """Return the message of a failed import and the user's last line that led to it.

    The result omits the path of a file of slurmrl or of Python's import system.
    """
    text = str(error)
    if error.path and _is_of_others(error.path):
        text = text.removesuffix(f" ({error.path})")
    return text + _line_of(error)


def _line_of(error: BaseException) -> str:
    """Return the last line of a traceback in the user's code, in parentheses.

    Return a line of a library if there is no such line, and an empty string without any line.
    """
    frames = traceback.extract_tb(error.__traceback__)
    files = [each for each in frames if not _is_of_others(each.filename)]
    libraries = tuple(map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
    own = [each for each in files if not each.filename.startswith(libraries)] or files
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def _is_of_others(file: str) -> bool:
    """Return whether a file is part of slurmrl or of Python's import system."""
    ours = Path(describe.__code__.co_filename).parent  # modules in a trial's archive have no path
    others = (ours, Path(importlib.__file__).parent)
    return file.startswith("<frozen importlib") or any(map(Path(file).is_relative_to, others))


def near(name: str, known: list[str], likeness: float = 0.6) -> str:
    """Return a hint for a misspelled name: the closest match, or at most SHOWN known names.

    ``likeness`` (0 to 1) is the minimum similarity of the match.
    """
    from difflib import get_close_matches as closest  # the import is slow and rarely needed

    close = closest(name, known, 1, likeness) or closest(name.lower(), known, 1, likeness)
    hint = f"did you mean '{close[0]}'? " if close else ""
    more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    return f"{hint}allowed: {', '.join(known[:SHOWN])}{more}"


class Registry:
    """The implementations of one kind.

    An unknown name raises UnknownNameError, which lists the known names.
    """

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def reference(self, name: str) -> str:
        """Return the ``module:attribute`` of a name. Raises UnknownNameError."""
        if name not in self._entries:
            raise UnknownNameError(f"unknown {self.kind} '{name}'; {near(name, sorted(self))}")
        return self._entries[name]

    def load(self, name: str) -> Any:
        return resolve(self.reference(name))

    def find(self, name: str) -> Any:
        """Return the implementation of a name, or the user's own ``module:attribute``.

        Raises UnknownNameError and the errors of `import_own`.
        """
        return import_own(self.kind, name) if ":" in name else self.load(name)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
