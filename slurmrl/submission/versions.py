"""Versions of what is installed, from metadata: nothing is imported."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import Any


def packages() -> dict[str, str]:
    """Every installed distribution and its version, in the order of their names. Of two with one
    name the first on the path counts, as it does for imports."""
    found: dict[str, str] = {}
    for one in metadata.distributions():
        known = one.metadata  # a file, parsed anew at each use
        if known["Name"]:  # what a killed installation left has none
            found.setdefault(known["Name"], known["Version"])
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def interpreter() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
    }
