"""The list of a fetched folder's files, beside it, by which a folder that lost some is noticed.

File systems that remove old files take single ones, and people remove folders that look unused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from slurmrl.errors import CorruptFileError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.shapes import SIZE, Fields, each

FIELDS: Final[Fields] = {"files": each(SIZE)}
"""Bytes by the path in the folder."""


def list_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def record(made: Path, folder: Path) -> None:
    """Write the list of a new folder's files before it gets its place at ``folder``.

    Raises EnvironmentFailure.
    """
    files = (path for path in sorted(made.rglob("*")) if path.is_file())
    sizes = {str(path.relative_to(made)): path.stat().st_size for path in files}
    atomic.replace(list_file(folder), json.dumps({"files": sizes}).encode())


def damage(folder: Path) -> str:
    """What a folder lacks, as the end of a sentence about it; empty if it is whole.

    Raises EnvironmentFailure if its list cannot be read.
    """
    if not folder.is_dir():
        return "is missing"
    try:
        files = documents.read(list_file(folder), FIELDS, FIELDS)["files"]
    except (FileNotFoundError, CorruptFileError):
        return f"cannot be checked: {list_file(folder).name} beside it is missing or damaged"
    lost = [name for name, size in files.items() if _size(folder / name) != size]
    if not lost:
        return ""
    more = f" and {len(lost) - 1} more files" if len(lost) > 1 else ""
    return f"is incomplete: {lost[0]}{more} missing or cut off"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
