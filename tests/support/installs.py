"""slurmrl as pip installs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "slurmrl", "cuda")
PIP = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")


def pip(command: str, folder: Path, *arguments: str) -> None:
    """Run ``pip command`` on a copy of this tree in ``folder``, because builds leave files.
    Requirements of slurmrl are not installed.
    """
    tree = folder / "tree"
    tree.mkdir()
    for name in SOURCES:
        subprocess.run(["cp", "-a", str(ROOT / name), str(tree / name)], check=True)
    words = [*PIP, command, "--no-deps", "--no-build-isolation", *arguments, str(tree)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
