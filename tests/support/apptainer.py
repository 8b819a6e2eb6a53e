"""Containers of the real Apptainer, in which a rank finds the Python and the packages of the test."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.trials import REPOSITORY

SYSTEM = ("usr", "bin", "lib", "lib64", "etc")
PLACES = (*SYSTEM, "dev", "proc", "sys", "tmp", "root", "var/tmp", "home")


def container(folder: Path, *options: str, packed: bool = False) -> str:
    """A value of ``cluster.slurm.container``: an image without a file of its own, as a folder or
    packed into one file, with this machine's system, Python and repository bound into it, and
    ``folder``. Skips where there is no Apptainer or it cannot make containers."""
    program = shutil.which("apptainer")
    if program is None:
        pytest.skip("apptainer is not installed here")
    image = folder / "image"
    for place in PLACES:
        (image / place).mkdir(parents=True)
    if packed:
        image = _run(program, "build", str(folder / "image.sif"), str(image), result=image)
    words = [program, "exec", *_binds(folder), *options, str(image)]
    _run(*words, sys.executable, "-c", "import torch", result=image)
    return shlex.join(words)


def _binds(folder: Path) -> list[str]:
    system = [Path("/", name) for name in SYSTEM]
    shown = [path for path in system if path.exists()]
    shown += [Path(sys.base_prefix), REPOSITORY, Path(sys.prefix)]
    return [*(f"--bind={path}:{path}:ro" for path in shown), f"--bind={folder}"]


def _run(*command: str, result: Path) -> Path:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        pytest.skip(f"apptainer cannot make containers here: {' / '.join(said)}")
    return result.with_suffix(".sif") if "build" in command else result
