"""Containers of the real Apptainer with the Python and packages of the test."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.trials import REPOSITORY, parent

SYSTEM = ("usr", "bin", "lib", "lib64", "etc")
EMPTY = (*SYSTEM, "dev", "proc", "sys", "tmp", "root", "home", "var/tmp")


def cluster(folder: Path, *options: str, packed: bool = False) -> dict[str, str]:
    """Settings of ``cluster.slurm`` for an empty image: a folder, or packed into one file. This
    machine's system, Python and repository, and ``folder``, are bound into the image. Skips if
    Apptainer is missing or cannot make containers.
    """
    program = shutil.which("apptainer")
    if program is None:
        pytest.skip("apptainer is not installed here")
    image = folder / "image"
    for place in EMPTY:
        (image / place).mkdir(parents=True)
    if packed:
        _try(program, "build", f"{image}.sif", str(image))
        image = image.with_suffix(".sif")
    words = [program, "exec", *_rights(), *_binds(folder), *options, str(image)]
    _try(*words, sys.executable, "--version")
    return {"container": shlex.join(words), "container_python": sys.executable}


def above(pid: int, agent: int) -> list[int]:
    """Return the processes between a process in a container and its agent."""
    found: list[int] = []
    while (pid := parent(Path(f"/proc/{pid}"))) not in (0, 1, agent):
        found.append(pid)
    return found


def _rights() -> list[str]:
    """Return the options for root, which keep Apptainer from requesting capabilities."""
    return ["--no-privs"] if os.geteuid() == 0 else []


def _binds(folder: Path) -> list[str]:
    shown = [path for path in (Path("/", name) for name in SYSTEM) if path.exists()]
    shown += [Path(sys.base_prefix), REPOSITORY, Path(sys.prefix)]
    return [*(f"--bind={path}:{path}:ro" for path in shown), f"--bind={folder}"]


def _try(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-3:]
        pytest.skip(f"apptainer cannot make containers here: {' / '.join(said)}")
