"""The files of the user's own modules that a run can import, found from their import statements.

No module is imported. Imports by a computed name are not found.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

SKIPPED = frozenset({"slurmrl"}) | sys.stdlib_module_names


def with_imported(found: dict[str, Path], modules: Iterable[str]) -> dict[str, Path]:
    """Return the modules in ``found``, by name, and the modules next to them that are imported.

    ``found`` has top-level modules. ``modules`` (dotted names) import the others directly or
    indirectly. Each reachable file is read once.
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
        yield from sorted(folder.glob("*.py"))  # a folder of modules: any may be meant
    for part in parts:
        yield from _python(folder / f"{part}.py")
        folder = folder / part
        yield from _python(folder / "__init__.py")


def _python(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path


def _package(top: Path, file: Path) -> list[str]:
    """Return the package of a file, the base of relative imports, as a list of names."""
    return [] if top == file else [top.name, *file.parent.relative_to(top).parts]


def _imported(file: Path, package: list[str]) -> Iterator[str]:
    """Yield the dotted names that a file imports. Invalid Python fails later, in the run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read_bytes())
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


def _beside(folder: Path, name: str) -> Path | None:
    """Return the module of that name in a folder, in the order in which Python looks.

    A folder without ``__init__.py`` comes after modules that are installed.
    """
    if (folder / name / "__init__.py").is_file():
        return folder / name
    if (folder / f"{name}.py").is_file():
        return folder / f"{name}.py"
    spec = PathFinder.find_spec(name)
    installed = spec is not None and spec.origin is not None
    return folder / name if not installed and any((folder / name).rglob("*.py")) else None
