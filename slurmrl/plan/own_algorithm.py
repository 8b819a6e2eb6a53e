"""The schema of a user's own algorithm: ``my_file.py:MyAlgorithm`` or ``package.module:Class``.

Login-node commands import the module without torch; ranks and the master import the trial's copy.
"""

from __future__ import annotations

import importlib
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from slurmrl.config.profiles import expanded
from slurmrl.errors import UsageError
from slurmrl.registry import import_own

KIND: Final = "algorithm"
OWN: Final = re.compile(r"[\w.]+:\w+")
OWN_FILE: Final = re.compile(r"(.+\.py):(\w+)")
FORMS: Final = "my_file.py:Class or package.module:Class of your own"
INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
DOCS: Final = "docs/algorithms.md, Your own"


class OwnName(NamedTuple):
    """The name of a user's own algorithm."""

    reference: str
    """``module:Class``"""
    folder: Path | None = None
    """The folder of the file, if the name is that of a file."""


def is_own(name: object) -> bool:
    """Whether a resolved configuration names a user's own algorithm."""
    return isinstance(name, str) and OWN.fullmatch(name) is not None


def own_name(text: str, folder: Path) -> OwnName | None:
    """The name in either form; None for another text. ``folder`` is the base of a relative file.

    :raises UsageError: there is no such file, or Python cannot import it by its name.
    """
    if OWN.fullmatch(text) and not text.partition(":")[0].endswith(".py"):
        return OwnName(text)
    match = OWN_FILE.fullmatch(text)
    if match is None:
        return None
    path = folder / expanded(match[1])
    if not path.is_file():
        raise UsageError(f"'{text}' is not allowed: there is no file {path}")
    if not path.stem.isidentifier():
        raise UsageError(
            f"'{text}' is not allowed: '{path.stem}' is no name of a module; rename the file to "
            "letters, digits and '_'"
        )
    return OwnName(f"{path.stem}:{match[2]}", path.parent)


def load_on_login_node(reference: str, folders: Sequence[Path]) -> Any:
    """The class that a name refers to. The modules in ``folders`` come first, and torch cannot be
    imported.

    :raises UsageError: with the reason why it cannot be loaded.
    """
    top = reference.partition(":")[0].partition(".")[0]
    try:
        with without_torch(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Field name .* shadows")  # `wrong_class` refuses it
            _use_module_of(top, folders)
            return import_own(KIND, reference)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        if _is_of_torch(error):
            raise UsageError(
                f"'{reference}' imports torch when it is loaded{_line_of(error, folders)}: "
                "commands on the login node read its settings without torch. Import torch inside "
                f"the functions that use it ({DOCS})"
            ) from error
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"'{reference}' cannot be loaded: {describe(error, folders)}") from error


@contextmanager
def importable(folders: Sequence[Path]) -> Iterator[None]:
    """Search folders for modules, after all others."""
    added = [str(folder) for folder in folders if str(folder) not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        sys.path[:] = [entry for entry in sys.path if entry not in added]


def describe(error: BaseException, folders: Sequence[Path]) -> str:
    """``NameError: name 'x' is not defined (my_file.py, line 3)``"""
    return f"{type(error).__name__}: {error}{_line_of(error, folders)}"


def _is_of_torch(error: BaseException) -> bool:
    return any(isinstance(each, TorchImportError) for each in (error, error.__cause__))


def _line_of(error: BaseException, folders: Sequence[Path]) -> str:
    """The innermost line of the user's own code."""
    raised = error.__cause__ or error
    for frame in reversed(traceback.extract_tb(raised.__traceback__)):
        if any(Path(frame.filename).is_relative_to(folder) for folder in folders):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


def _use_module_of(top: str, folders: Sequence[Path]) -> None:
    """Load ``top`` from ``folders``, if it is there: anew, because another one may be loaded."""
    spec = own_module(top, folders)
    if spec is None or spec.loader is None:
        return
    for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
        del sys.modules[name]
    module = module_from_spec(spec)
    sys.modules[top] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(top, None)
        raise


def own_module(top: str, folders: Sequence[Path]) -> ModuleSpec | None:
    """The module of a name in ``folders``, if it is there.

    :raises UsageError: it would hide a module of Python, slurmrl or an installed package.
    """
    importlib.invalidate_caches()
    spec = PathFinder.find_spec(top, [str(folder) for folder in folders])
    if spec is None or not spec.has_location:
        return None
    if top == "slurmrl" or top in sys.stdlib_module_names or _is_installed(top, folders):
        raise UsageError(
            f"{spec.origin} is not allowed: it would hide the module {top} that is already there; "
            "rename the file"
        )
    return spec


def _is_installed(top: str, folders: Sequence[Path]) -> bool:
    others = [path for path in sys.path if Path(path).absolute() not in folders]
    spec = PathFinder.find_spec(top, others)
    return spec is not None and bool(INSTALLED & set(Path(spec.origin or "").parts))


class TorchImportError(ImportError):
    """torch was imported on the login node."""


class _NoTorch(MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name == "torch":
            raise TorchImportError("torch cannot be imported on the login node", name=name)
        return None


@contextmanager
def without_torch() -> Iterator[None]:
    """Refuse imports of torch, unless this process has imported it already."""
    finder = _NoTorch()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
