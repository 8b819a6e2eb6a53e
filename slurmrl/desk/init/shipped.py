"""The examples that come with slurmrl."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from slurmrl import package
from slurmrl.desk import copying
from slurmrl.errors import EnvironmentFailure, UsageError
from slurmrl.fsio import atomic

FOLDER: Final = package.FOLDER / "examples"
FETCHED: Final = ("data",)
"""What the user of a checkout has put there."""


def examples() -> Iterator[tuple[str, str]]:
    """The configurations, each with what it says about itself. Raises EnvironmentFailure."""
    if not FOLDER.is_dir():
        raise EnvironmentFailure(
            f"{FOLDER} is not there: this slurmrl was copied without its examples; install it"
        )
    for path in sorted(FOLDER.rglob("*.yaml")):
        if path.relative_to(FOLDER).parts[0] not in FETCHED:
            yield str(path.relative_to(FOLDER)), _summary(path)


def copy(target: Path) -> None:
    """Copy all examples with their data into a new folder, which appears as a whole.

    Raises UsageError for one that exists, EnvironmentFailure.
    """
    list(examples())
    if target.exists() and not (target.is_dir() and not os.listdir(target)):
        raise UsageError(f"{target} exists: --output names another folder")
    made = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    try:
        copying.copy(FOLDER.resolve(), made, FETCHED)
        os.rename(made, target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    atomic.sync_directory(target.parent)


def _summary(path: Path) -> str:
    """What the comment at its top begins with, up to a colon or the end of the sentence."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        lines.append(line.removeprefix("# "))
    return re.split(r"[.:] ", " ".join(lines))[0].rstrip(".:")
