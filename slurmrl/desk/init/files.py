"""Writing new files without overwriting any."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slurmrl.errors import UsageError
from slurmrl.fsio import atomic


def write(files: Mapping[Path, str], *, force: bool) -> list[Path]:
    """Write all files or none: one that exists with another content is refused, unless ``force``.

    Return those that were not there yet with this content.

    Raises UsageError, and EnvironmentFailure for what cannot be written. Each file appears as a
    whole; the first one in order is written last, so that where it is, the others are.
    """
    data = {path: text.encode() for path, text in files.items()}
    taken = [str(path) for path in data if path.exists() and not _has(path, data[path])]
    if taken and not force:
        verb = "exist" if len(taken) > 1 else "exists"
        raise UsageError(f"{', '.join(taken)} {verb}: --force replaces, --output names another")
    for path in data:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is no file: --output names another one")
    needed = [path for path in data if not _has(path, data[path])]
    for path in reversed(needed):
        if force:
            atomic.replace(path, data[path])
        elif not atomic.exclusive_create(path, data[path]):
            raise UsageError(f"{path} has just been made by another process: left as it is")
    return needed


def _has(path: Path, data: bytes) -> bool:
    """Whether a file has this content already."""
    return path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data
