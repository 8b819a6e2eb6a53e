"""A copy of this repository, and commands in it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def call(command: Sequence[str | Path], folder: Path, **variables: str) -> str:
    """Run a command that must succeed, and return its output."""
    inherited = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def checkout(folder: Path) -> str:
    """Copy the files of the repository into a new repository. Return its commit."""
    files = call(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT)
    for name in filter(None, files.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(ROOT / name):  # The index still lists deleted files.
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "all"]):
        call([*git, *words], folder)
    return call(["git", "rev-parse", "HEAD"], folder).strip()
