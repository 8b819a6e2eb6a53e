"""Build a library once and publish it in the cache.

The cache may be shared by hosts. On one host, a file lock on its own disk lets one process build
while the others wait; the kernel frees it when its holder dies. Hosts do not wait for each other:
whoever has built first publishes, by exclusive creation of a whole file, and the others take that.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from filelock import FileLock, Timeout

from slurmrl import env
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio import atomic, ownership
from slurmrl.ops.native.recipe import Half, Recipe, stem

BUILD_TIMEOUT_S = 3600.0
"""Compiling takes a minute and a half on an idle machine, and many times that on a busy one."""
LOCK_TIMEOUT_S = 2 * BUILD_TIMEOUT_S
"""As long as two builders in a row may take."""
PROGRAM = Path(__file__).with_name("compile.py")
LOG_LINES = 30

Compile = Callable[[Recipe, Path], Path]
"""(recipe, empty folder) -> the library in it."""


def cache_folder() -> Path:
    """SLURMRL_OPS_CACHE, or ``slurmrl/ops`` in the user's folder for caches."""
    chosen = env.OPS_CACHE.get()
    if chosen:
        return Path(chosen).absolute()
    home = os.path.expanduser("~")
    return Path(env.XDG_CACHE_HOME.get() or f"{home}/.cache").absolute() / "slurmrl" / "ops"


def host_folder() -> Path:
    """A folder of ours on this host's own disk, for locks and for builds that are under way."""
    return Path(tempfile.gettempdir()) / f"slurmrl-ops-{os.getuid()}"


def library(recipe: Recipe, cache: Path, host: Path, *, run: Compile | None = None) -> Path:
    """The library of a recipe, built and published if the cache does not hold it.

    Raises EnvironmentFailure (OwnershipError where others could put files into the cache) if it
    cannot be had.
    """
    _make_ours(cache)
    path = cache / f"{recipe.key}.so"
    if path.exists():
        return path
    _make_ours(host)
    began = time.time()
    try:
        with FileLock(host / f"{recipe.key}.lock", timeout=LOCK_TIMEOUT_S):
            if not path.exists():
                _raise_if_failed(_failure(recipe, host), began)
                _build(recipe, path, host, run or run_compiler)
    except Timeout as error:
        raise EnvironmentFailure(
            f"waited {LOCK_TIMEOUT_S:.0f} s for another process of this host to build {path.name}; "
            f"its lock is {error.lock_file}"
        ) from error
    return path


def ready_made(half: Half, cache: Path) -> list[Path]:
    """Libraries of our sources in the cache by any compilers, newest first: for hosts without."""
    if not cache.is_dir():
        return []
    ownership.check(cache)
    found = cache.glob(f"{stem(half)}-*.so")
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def run_compiler(recipe: Recipe, folder: Path) -> Path:
    """Compile in a process of its own, which also tries to load the result."""
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environ = {**os.environ, "PATH": search, "CXX": recipe.cxx}  # ninja lies beside python
    process = subprocess.Popen(
        [sys.executable, "-P", str(PROGRAM), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        start_new_session=True,
    )
    with process:
        try:
            said, _ = process.communicate(json.dumps(_spec(recipe)), timeout=BUILD_TIMEOUT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                reason = f"building {recipe.name} took more than {BUILD_TIMEOUT_S:.0f} s"
                raise EnvironmentFailure(reason) from error
            raise
    if process.returncode != 0:
        end = "\n".join(said.splitlines()[-LOG_LINES:])
        raise EnvironmentFailure(f"building {recipe.name} failed:\n{end}")
    return folder / f"{recipe.name}.so"


def _spec(recipe: Recipe) -> dict[str, object]:
    return {**asdict(recipe), "name": recipe.name}


def _build(recipe: Recipe, path: Path, host: Path, run: Compile) -> None:
    """Under the lock: nobody else of this host builds this library."""
    for leftover in host.glob(f"{recipe.key}.build.*"):  # of a builder that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    atomic.sweep_temporaries(path.parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{recipe.key}.build.", dir=host))
    try:
        built = run(recipe, folder).read_bytes()
        # False is as good: another host was faster, with a library of the same recipe.
        atomic.exclusive_create(path, built)
    except EnvironmentFailure as error:
        _failure(recipe, host).write_text(str(error))
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _failure(recipe: Recipe, host: Path) -> Path:
    """Why the last build on this host failed."""
    return host / f"{recipe.key}.failure"


def _raise_if_failed(failure: Path, began: float) -> None:
    """A build that failed while we waited for it would fail again, once for each who waits."""
    if failure.exists() and failure.stat().st_mtime >= began:
        raise EnvironmentFailure(failure.read_text())


def _make_ours(folder: Path) -> None:
    """What is loaded from a folder runs as us, so nobody else may write there."""
    atomic.make_private_directory(folder)
    ownership.check(folder)
