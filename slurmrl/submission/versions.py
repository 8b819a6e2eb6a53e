"""Versions of what is installed, from metadata: nothing is imported."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import Any


def packages() -> dict[str, str]:
    """Return every installed distribution and its version, by name. Of two with one name the first
    on the path counts, as for imports."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        known = distribution.metadata  # a file, parsed anew at each use
        if known["Name"]:  # missing in what a killed installation left
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
