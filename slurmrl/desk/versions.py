"""Versions of what is installed, from metadata: nothing is imported."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any, NamedTuple


def packages() -> dict[str, str]:
    """Return every installed distribution and its version, by name.

    Of two with one name the first on the path counts, as for imports.
    """
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        known = distribution.metadata  # a file, parsed anew at each use
        if known["Name"]:  # missing in what a killed installation left
            versions.setdefault(known["Name"], known["Version"])
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


class TorchBuild(NamedTuple):
    version: str
    """``2.13.0+cu126``; PyPI's builds have no suffix in their metadata, but here."""
    cuda: str | None
    """Version of CUDA, ``12.9``; None for a build without CUDA."""
    gpus: bool
    """Whether it is built for GPUs, of whatever maker."""


def torch_build() -> TorchBuild | None:
    """Return how the installed torch was built, from its ``version.py``; None without torch."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0], "version.py")
    try:
        known = run_path(str(file))
    except OSError:
        return None
    cuda = known.get("cuda")
    return TorchBuild(str(known["__version__"]), cuda, bool(cuda or known.get("hip")))


def interpreter() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
    }
