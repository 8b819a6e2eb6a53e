"""Snapshots of the code that a run executes, and the user's own code in them.

``code/`` contains this package, the user's own code and a record of their origin.
``resume --update-code`` takes another snapshot, ``code.<n>/``. A snapshot is built under another
name and then renamed. A submission's request and batch script name its snapshot, so that a job
never sees parts of two snapshots.

The user's own code consists of the entries of ``code`` and the modules of the algorithm, the reward
and the type of dataset. Modules next to these modules are also the user's code if they are
imported. The files are parsed and not imported, because the code may need torch or a GPU. Imports
by a computed name are not found.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from filecmp import cmp
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from slurmrl import package
from slurmrl.config.schema import Config
from slurmrl.config.schema.reward import ALONE
from slurmrl.config.source import Source, dotted
from slurmrl.desk import copying
from slurmrl.errors import ConfigError, EnvironmentFailure, Problem, UsageError
from slurmrl.fsio import atomic, calls, documents
from slurmrl.fsio.documents import COUNT
from slurmrl.plan.algorithms import Algorithm, all_calls
from slurmrl.plan.own_algorithm import is_own, own_module
from slurmrl.plan.settings import Settings
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.submission import submission_numbers

PACKAGE = "slurmrl"
MOST_COPIES = 3
"""Maximum number of attempts to copy code that changes during the copy."""
MOST_NOTES = 3
"""Maximum number of changed files that a submission names."""
PAUSE_S = 1.0
"""Seconds between two attempts."""
Record = Callable[[Path], None]
"""Function that writes the provenance record into a snapshot."""
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages, which are not copied; their versions are recorded."""
SKIPPED = frozenset({"slurmrl"}) | sys.stdlib_module_names


def take_snapshot(paths: RunPaths, code: OwnCode, record: Record) -> None:
    """Make the first snapshot of a trial."""
    os.rename(_build(paths, code, record), paths.code)  # This replaces the trial's empty folder.
    atomic.sync_directory(paths.run)


def add_snapshot(paths: RunPaths, code: OwnCode, record: Record) -> int:
    """Make another snapshot; return its number."""
    copy = _build(paths, code, record)
    number = next_snapshot(paths)
    while True:
        try:
            os.rename(copy, paths.snapshot(number))
        except OSError:
            if not paths.snapshot(number).exists():
                shutil.rmtree(copy, ignore_errors=True)
                raise
            number += 1  # Another process took this number.
            continue
        atomic.sync_directory(paths.run)
        return number


def current_snapshot(paths: RunPaths) -> int:
    """Return the number of the snapshot that the newest submission runs."""
    for number in sorted(submission_numbers(paths), reverse=True):
        path = paths.submission_request(number)
        try:
            request = documents.read(path, {"snapshot": COUNT})
        except FileNotFoundError:
            continue
        snapshot: int = request.get("snapshot") or 1
        return snapshot
    return 1


def current_code(paths: RunPaths) -> Path:
    """Return the folder of the snapshot that the newest submission runs."""
    return paths.snapshot(current_snapshot(paths))


def edited(code: OwnCode, folder: Path) -> list[str]:
    """Return notes about the user's files that differ from a snapshot: three, then a count.

    Raises EnvironmentFailure for a file that cannot be read.
    """
    found = [(path.name / name, file) for path in code.paths for name, file in copying.files(path)]
    notes = []
    for name, file in found:
        if not (folder / name).is_file():
            notes.append(f"runs without {file}, which is new")
        elif not _are_equal(file, folder / name):
            notes.append(f"keeps its copy of {file}, which has changed")
    left = len(notes) - MOST_NOTES
    return notes[:MOST_NOTES] + ([f"{left} other files have changed or are new"] * (left > 0))


def _are_equal(file: Path, copy: Path) -> bool:
    try:
        return cmp(file, copy, shallow=False)
    except OSError as error:
        raise calls.explain(error, "compare", file) from error


def next_snapshot(paths: RunPaths) -> int:
    """Return the number of the next snapshot."""
    return max(_numbers(paths)) + 1


def is_this_code(folder: Path) -> bool:
    """Return whether the slurmrl in a snapshot equals the running slurmrl byte for byte.

    Return True for a snapshot without slurmrl.
    """
    kept = folder / PACKAGE
    return not kept.is_dir() or copying.is_this_package(kept)


def _build(paths: RunPaths, code: OwnCode, record: Record) -> Path:
    """Build a complete snapshot under a temporary name; remove it on failure.

    Raises UsageError if the code changes during each attempt, for example by a git rebase: the
    snapshot would mix two versions.
    """
    sources: dict[Path, Collection[str]] = dict.fromkeys(code.paths, ())
    sources[package.FOLDER] = copying.NO_CODE
    changed: list[Path] = []
    for attempt in range(MOST_COPIES):
        if attempt:
            time.sleep(PAUSE_S)
        before = copying.stamps(sources)
        copy = paths.run / f".code.{uuid.uuid4().hex}"
        try:
            _fill(copy, code, record)
        except BaseException as error:
            shutil.rmtree(copy, ignore_errors=True)
            changed = _changed(before, sources)
            if not isinstance(error, EnvironmentFailure) or not changed:
                raise
            continue  # A file vanished while it was copied.
        changed = _changed(before, sources)
        if not changed:
            return copy
        shutil.rmtree(copy)
    raise UsageError(
        f"the code changed during {MOST_COPIES} copies in a row, last {changed[0]}: submit again "
        "when no program changes the files (git checkout or rebase, an editor, a synchronization)"
    )


def _fill(copy: Path, code: OwnCode, record: Record) -> None:
    atomic.make_private_directory(copy)
    copying.copy_package(copy / PACKAGE)
    for path in code.paths:
        copying.copy(path, copy / path.name)
    record(copy)


def _changed(
    before: Mapping[Path, tuple[int, ...]], sources: Mapping[Path, Collection[str]]
) -> list[Path]:
    """Return the files that differ from their stamps, appeared or vanished."""
    now = copying.stamps(sources)
    return sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))


def _numbers(paths: RunPaths) -> list[int]:
    matches = (re.fullmatch(r"code\.([0-9]{1,9})", name) for name in os.listdir(paths.run))
    return [1, *(int(match[1]) for match in matches if match)]


@dataclass(frozen=True)
class OwnCode:
    """The user's code: files and folders to copy, and notes on modules that were not found."""

    folders: tuple[Path, ...] = ()
    """Folders that are searched for modules before the interpreter's path."""
    paths: tuple[Path, ...] = ()
    notes: tuple[str, ...] = field(default=())


def find_own_code(settings: Settings, folders: Sequence[Path] | None = None) -> OwnCode:
    """Find the code that a configuration needs.

    ``folders`` replace the folders of the settings. Raises ConfigError for entries of ``code`` that
    cannot be copied.
    """
    config, source = settings.config, settings.source
    folders = settings.folders if folders is None else folders
    problems = [
        source.problem(("code", index), message)
        for index, path in enumerate(config.code)
        for message in _wrong(Path(path), [Path(before) for before in config.code[:index]])
    ]
    if problems:
        raise ConfigError(tuple(problems))
    own = {Path(path).stem: Path(path) for path in config.code}
    notes, modules = [], list(own)
    importlib.invalidate_caches()
    _check_names(config, source, folders)
    for key, reference in [*_references(config), *_of_algorithm(config, settings.algorithm)]:
        module = reference.partition(":")[0]
        top = module.partition(".")[0]
        if top == "slurmrl":
            continue
        if top in own:
            modules.append(module)
            continue
        place = _locate(top, folders)
        if place is None:
            notes.append(
                f"{key}: module '{top}' was not found here; the run must be able to import it"
            )
        elif not _installed(place):
            own[top] = place
            modules.append(module)
    own = with_imported(own, modules)
    _check_sizes([path for path in own.values() if str(path) not in config.code], source)
    return OwnCode(tuple(folders), tuple(own.values()), tuple(notes))


def undefined(settings: Settings) -> Iterator[str]:
    """Yield messages about the user's files that are not Python or lack the name in a setting.

    The files are parsed and not imported. A file that uses the name anywhere may define it.
    """
    for key, reference in _references(settings.config):
        module, _, name = reference.partition(":")
        place = _locate(module.partition(".")[0], settings.folders)
        last = module.rpartition(".")[2]
        files = [] if place is None or _installed(place) else [*_files(place, module)]
        for file in files[-1:]:  # The files before it are __init__ files.
            if last not in (file.stem, file.parent.name) or file.suffix != ".py":
                continue
            try:
                used = ast.dump(_parsed(file))
            except RecursionError:
                continue
            except (SyntaxError, ValueError) as error:
                yield f"{key}: {file} is not valid Python: {error}"
                continue
            if not any(f"'{each}'" in used for each in (name, "*", "__getattr__", "globals")):
                yield f"{key}: {file} does not define '{name}'"


def _wrong(path: Path, before: Sequence[Path]) -> Iterator[str]:
    if not path.exists():
        yield f"'{path}' is not allowed: there is no such file or folder"
        return
    if path.is_file() and path.suffix not in (".py", ".so"):
        yield f"'{path}' is not allowed: it is not a Python file (.py, .so)"
    name = path.name.partition(".")[0]
    if name == "slurmrl":
        yield f"'{path}' is not allowed: it would hide slurmrl, which is always copied"
    if name in sys.stdlib_module_names:
        yield f"'{path}' is not allowed: it would hide the standard library's {name}"
    if path.name in [other.name for other in before]:
        yield f"'{path}' is not allowed: another entry has the same name"
    try:
        copying.check_size(path)
    except UsageError as error:
        yield str(error)


def _check_names(config: Config, source: Source, folders: Sequence[Path]) -> None:
    """Raise ConfigError for user modules with the name of a standard module or installed package.

    Python would use the standard module instead of the user's module, and other code needs the
    installed package.
    """
    problems = []
    for key, reference in _references(config):
        module = reference.partition(":")[0]
        top = module.partition(".")[0]
        try:
            if top in sys.stdlib_module_names:
                raise UsageError(
                    f"'{module}' is not allowed: Python's standard library has a module of that "
                    "name; rename the file"
                )
            if module == "slurmrl":
                raise UsageError(
                    "'slurmrl' is not allowed: the package slurmrl itself has this name; rename "
                    "the file slurmrl.py"
                )
            if top != "slurmrl":
                own_module(top, folders)
        except UsageError as error:
            problems.append(Problem(str(source.path), key, str(error)))
    if problems:
        raise ConfigError(tuple(problems))


def _references(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the name of each function or class of the user's code.

    The form of a name is ``package.module:Class``.
    """
    for where, reward in config.rewards().items():
        for name, part in reward.functions.items():
            if ":" in part.name:
                last = f"parts.{name}.name" if name != ALONE else "name"
                yield f"{dotted(where)}.{last}", part.name
    for where, dataset in config.datasets().items():
        if ":" in dataset.type:
            yield dotted((*where, "type")), dataset.type
    for key, name in config.rollout.episode.own.items():
        yield f"rollout.episode.{key}", name


def _of_algorithm(config: Config, algorithm: Algorithm) -> Iterator[tuple[str, str]]:
    """Yield key and name of the classes of a user's own algorithm: schema and interfaces."""
    if not is_own(algorithm.name):
        return
    interfaces = [call.interface for call in all_calls(config, algorithm)]
    for reference in dict.fromkeys([algorithm.name, *interfaces, algorithm.controller()]):
        yield "algorithm.name", reference


def _locate(name: str, folders: Sequence[Path]) -> Path | None:
    """Return the file or folder of a top-level module; None if it is built-in or missing."""
    spec = PathFinder.find_spec(name, [*map(str, folders), *sys.path])
    try:
        spec = spec or find_spec(name)  # An import hook may provide the package.
    except ValueError:
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.has_location and spec.origin else None


def _installed(path: Path) -> bool:
    base = Path(importlib.__file__).parents[1]
    return bool(INSTALLED & set(path.parts)) or path.is_relative_to(base)


def _check_sizes(paths: Iterable[Path], source: Source) -> None:
    problems = []
    for path in paths:
        try:
            copying.check_size(path)
        except UsageError as error:
            problems.append(Problem(str(source.path), "code", str(error)))
    if problems:
        raise ConfigError(tuple(problems))


def with_imported(found: dict[str, Path], modules: Iterable[str]) -> dict[str, Path]:
    """Return ``found`` and the modules next to them that ``modules`` import, even indirectly.

    ``found`` maps top-level modules to paths; ``modules`` are dotted names of modules in them. Each
    file is read once.
    """
    result = dict(found)
    waiting, seen = list(modules), set[Path]()
    while waiting:
        name = waiting.pop()
        top = name.partition(".")[0]
        for file in _files(result[top], name):
            if file in seen:
                continue
            seen.add(file)
            for imported in _imported(file, _package(result[top], file)):
                first = imported.partition(".")[0]
                beside = None if first in SKIPPED else _beside(result[top].parent, first)
                if first not in result and beside is not None:
                    result[first] = beside
                if first in result:
                    waiting.append(imported)
    return result


def _files(top: Path, name: str) -> Iterator[Path]:
    """Yield the Python files that importing a dotted name executes."""
    if top.is_file():
        yield top
        return
    folder = top
    parts = name.split(".")[1:]
    yield from _python(folder / "__init__.py")
    if not parts and not (folder / "__init__.py").is_file():
        yield from sorted(folder.glob("*.py"))  # Without __init__, any module may be used.
    for part in parts:
        yield from _python(folder / f"{part}.py")
        folder = folder / part
        yield from _python(folder / "__init__.py")


def _python(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path


def _package(top: Path, file: Path) -> list[str]:
    """Return the names of the packages around a file, from which relative imports start."""
    return [] if top == file else [top.name, *file.parent.relative_to(top).parts]


def _imported(file: Path, package: list[str]) -> Iterator[str]:
    """Yield the dotted names that a file imports; none if it is no valid Python."""
    try:
        tree = _parsed(file)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            if module and (above or not node.level):
                yield from (f"{module}.{alias.name}" for alias in node.names)


def _parsed(file: Path) -> ast.AST:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(file.read_bytes())


def _beside(folder: Path, name: str) -> Path | None:
    """Return the path of a module in a folder; None if it is missing.

    The order is Python's: a folder without ``__init__.py`` comes after installed modules.
    """
    if (folder / name / "__init__.py").is_file():
        return folder / name
    if (folder / f"{name}.py").is_file():
        return folder / f"{name}.py"
    spec = PathFinder.find_spec(name)
    installed = spec is not None and spec.origin is not None
    return folder / name if not installed and any((folder / name).rglob("*.py")) else None
