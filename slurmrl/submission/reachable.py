"""Which files of the user's own modules a run can import, found by reading their import statements,
without importing any of them. What is imported by a computed name is not seen."""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

SKIPPED = frozenset({"slurmrl"}) | sys.stdlib_module_names


def with_imported(found: dict[str, Path], modules: Iterable[str]) -> dict[str, Path]:
    """The top-level modules in ``found``, by name, and those beside them that are imported on the
    way from ``modules`` (dotted names); each file that is reached is read once."""
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
    """What importing a dotted name executes, as far as it is Python."""
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
    """The names of the package that a file belongs to: what relative imports start from."""
    return [] if top == file else [top.name, *file.parent.relative_to(top).parts]


def _imported(file: Path, package: list[str]) -> Iterator[str]:
    """Dotted names that a file imports. One that is not valid Python says so in the run."""
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
    if (folder / name / "__init__.py").is_file():
        return folder / name
    return folder / f"{name}.py" if (folder / f"{name}.py").is_file() else None
