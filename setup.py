"""Build with setup.cfg, and leave the commit in the package, so that ``--version`` can name it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).parent
FILE = "slurmrl/commit.txt"


def commit() -> str:
    """The commit of this checkout; what an archive of it has kept; empty outside of both."""
    kept = HERE / FILE
    if kept.is_file():
        return kept.read_text(encoding="ascii")
    if not (HERE / ".git").exists():
        return ""
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("+changes" if _git("status", "--porcelain", "--", "slurmrl") else "") + "\n"
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*words: str) -> str:
    command = ["git", "-C", str(HERE), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def leave(folder: str) -> None:
    if text := commit():
        path = Path(folder, FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")


class BuildWithCommit(build_py):
    def run(self) -> None:
        if not self.editable_mode:  # an earlier build may have left modules that are gone
            shutil.rmtree(Path(self.build_lib, "slurmrl"), ignore_errors=True)
        super().run()
        if not self.editable_mode:
            leave(self.build_lib)


class ArchiveWithCommit(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        leave(base_dir)


setup(cmdclass={"build_py": BuildWithCommit, "sdist": ArchiveWithCommit})
