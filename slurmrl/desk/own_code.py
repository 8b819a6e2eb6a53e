"""The user's own code that a run needs.

It has the entries of ``code``, the modules of the algorithm, the reward and the type of dataset,
and the modules next to them that they import. Nothing is imported to find it: the code may need
torch or a GPU.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from slurmrl.config.schema import Config
from slurmrl.config.schema.reward import ALONE
from slurmrl.config.source import Source, dotted
from slurmrl.desk import copying
from slurmrl.desk.reachable import with_imported
from slurmrl.errors import ConfigError, Problem, UsageError
from slurmrl.plan.algorithms import Algorithm, all_calls
from slurmrl.plan.own_algorithm import is_own, own_module

INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages, which are not copied; their versions are recorded."""


@dataclass(frozen=True)
class OwnCode:
    """The files and folders to copy, and notes on modules that were not found."""

    folders: tuple[Path, ...] = ()
    """Folders searched for modules before the interpreter's own path."""
    paths: tuple[Path, ...] = ()
    notes: tuple[str, ...] = field(default=())


def find(
    config: Config, source: Source, folders: Sequence[Path], algorithm: Algorithm | None = None
) -> OwnCode:
    """Find the code of a configuration, with that of the calls of ``algorithm``.

    Raises ConfigError for entries of ``code`` that cannot be copied.
    """
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
    for key, module in [*_references(config), *_of_algorithm(config, algorithm)]:
        top = module.partition(".")[0]
        if top == "slurmrl":
            continue
        if top in own:
            modules.append(module)
            continue
        place = _locate(top, folders)
        if place is None:
            notes.append(
                f"{key}: module '{top}' was not found here; it must be on the path of the run"
            )
        elif not _installed(place):
            own[top] = place
            modules.append(module)
    own = with_imported(own, modules)
    _check_sizes([path for path in own.values() if str(path) not in config.code], source)
    return OwnCode(tuple(folders), tuple(own.values()), tuple(notes))


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
    """Raise ConfigError for own modules with a name of the standard library or of a package.

    The standard library has loaded its module long before. Other code needs the module of an
    installed package.
    """
    problems = []
    for key, module in _references(config):
        top = module.partition(".")[0]
        try:
            if top in sys.stdlib_module_names:
                raise UsageError(
                    f"'{module}' is not allowed: Python's standard library has a module of that "
                    "name; rename the file"
                )
            if top != "slurmrl":
                own_module(top, folders)
        except UsageError as error:
            problems.append(Problem(str(source.path), key, str(error)))
    if problems:
        raise ConfigError(tuple(problems))


def _references(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the modules that settings name as ``package.module:Class``."""
    for where, reward in config.rewards().items():
        for name, part in reward.functions.items():
            if ":" in part.name:
                last = f"parts.{name}.name" if name != ALONE else "name"
                yield f"{dotted(where)}.{last}", part.name.partition(":")[0]
    for where, dataset in config.datasets().items():
        if ":" in dataset.type:
            yield dotted((*where, "type")), dataset.type.partition(":")[0]
    for key, name in config.rollout.episode.own.items():
        yield f"rollout.episode.{key}", name.partition(":")[0]


def _of_algorithm(config: Config, algorithm: Algorithm | None) -> Iterator[tuple[str, str]]:
    """Yield the modules of a user's own algorithm: its schema's, and those that this one names."""
    if algorithm is None or not is_own(algorithm.name):
        return
    interfaces = [call.interface for call in all_calls(config, algorithm)]
    for reference in dict.fromkeys([algorithm.name, *interfaces, algorithm.controller()]):
        yield "algorithm.name", reference.partition(":")[0]


def _locate(name: str, folders: Sequence[Path]) -> Path | None:
    """Return the file or folder of a top-level module; None for a built-in or missing one."""
    spec = PathFinder.find_spec(name, [*map(str, folders), *sys.path])
    try:
        spec = spec or find_spec(name)  # packages that an import hook of their own provides
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
