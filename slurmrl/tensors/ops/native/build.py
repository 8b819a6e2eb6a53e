"""Build a library once and publish it in the cache.

The cache may be shared by hosts. On each host, a file lock on local disk lets one process build
while the others wait; the kernel releases it when its holder dies. Hosts do not wait for each
other: the first to finish publishes, by exclusive creation of a whole file, and the others use it.
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
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path

from filelock import FileLock, Timeout

from slurmrl import env, log, package
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio import atomic, ownership
from slurmrl.tensors.ops.native.recipe import Half, Recipe, inputs, stem

logger = log.get(__name__)

COMMAND = "python -m slurmrl.tensors.ops.native"
"""Compiles the operators ahead of time."""
BUILD_TIMEOUT_S = 3600.0
"""Compiling takes a minute and a half on an idle machine, and many times that on a busy one."""
LOCK_TIMEOUT_S = 2 * BUILD_TIMEOUT_S
"""The longest that two builds in a row may take."""
PROGRAM = "tensors/ops/native/compile.py"
LOG_LINES = 30

Compile = Callable[[Recipe, Path], Path]
"""(recipe, empty folder) -> the library in it."""
Building = Callable[[], AbstractContextManager[object]]
building: ContextVar[Building] = ContextVar("building", default=nullcontext)
"""Makes the context in which a process builds, or waits for another one that builds. A rank sets it
to show that to people."""


def cache_folder() -> Path:
    """SLURMRL_OPS_CACHE, or ``slurmrl/ops`` in the user's cache folder."""
    chosen = env.OPS_CACHE.get()
    if chosen:
        return Path(chosen).absolute()
    return env.cache_folder("ops")


def host_folder() -> Path:
    """A private folder on this host's local disk, for locks and unfinished builds."""
    return Path(tempfile.gettempdir()) / f"slurmrl-ops-{os.getuid()}"


def library(recipe: Recipe, cache: Path, host: Path, *, run: Compile | None = None) -> Path:
    """The library of a recipe, built and published if the cache lacks it.

    Raises EnvironmentFailure if it cannot be built, OwnershipError if others can write to the
    cache.
    """
    _make_ours(cache)
    path = cache / f"{recipe.key}.so"
    if path.exists():
        return path
    _make_ours(host)
    began = time.time()
    try:
        with building.get()(), FileLock(host / f"{recipe.key}.lock", timeout=LOCK_TIMEOUT_S):
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
    """Cached libraries of these sources from any compiler, newest first, for hosts without one."""
    if not cache.is_dir():
        return []
    ownership.check(cache)
    libraries = cache.glob(f"{stem(half)}-*.so")
    return sorted(libraries, key=lambda path: path.stat().st_mtime, reverse=True)


def run_compiler(recipe: Recipe, folder: Path) -> Path:
    """Compile in a separate process, which also tries to load the result."""
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environ = {**os.environ, "PATH": search, "CXX": recipe.cxx}  # ninja is installed beside python
    program, sources = folder / "compile.py", folder / "sources"
    program.write_bytes(package.read(PROGRAM))
    for name, content in inputs(recipe.half).items():
        path = sources / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    spec = json.dumps(_spec(recipe, sources))
    process = subprocess.Popen(
        [sys.executable, "-P", str(program), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        start_new_session=True,
    )
    with process:
        try:
            output, _ = process.communicate(spec, timeout=BUILD_TIMEOUT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                reason = f"building {recipe.name} took more than {BUILD_TIMEOUT_S:.0f} s"
                raise EnvironmentFailure(reason) from error
            raise
    if process.returncode != 0:
        end = "\n".join(output.splitlines()[-LOG_LINES:])
        raise EnvironmentFailure(f"building {recipe.name} failed:\n{end}")
    return folder / f"{recipe.name}.so"


def _spec(recipe: Recipe, sources: Path) -> dict[str, object]:
    paths = [str(sources / name) for name in recipe.sources]
    return {**asdict(recipe), "name": recipe.name, "sources": paths}


def _build(recipe: Recipe, path: Path, host: Path, run: Compile) -> None:
    """Build and publish, under the lock: no other process of this host builds this library."""
    for leftover in host.glob(f"{recipe.key}.build.*"):  # from a killed builder
        shutil.rmtree(leftover, ignore_errors=True)
    atomic.sweep_temporaries(path.parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{recipe.key}.build.", dir=host))
    logger.info(
        "compiling the operators of slurmrl into %s: 20 to 90 s, once for this cache; to compile "
        "them before a job: %s",
        path,
        COMMAND,
    )
    began = time.monotonic()
    try:
        built = run(recipe, folder).read_bytes()
        logger.info("compiled the operators in %.0f s", time.monotonic() - began)
        # If another host was faster, its library of the same recipe stays.
        atomic.exclusive_create(path, built)
    except EnvironmentFailure as error:
        _failure(recipe, host).write_text(str(error))
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _failure(recipe: Recipe, host: Path) -> Path:
    """The file with the error of this host's last failed build."""
    return host / f"{recipe.key}.failure"


def _raise_if_failed(failure: Path, began: float) -> None:
    """Raise the error of a build that failed while we waited: another attempt would fail too."""
    if failure.exists() and failure.stat().st_mtime >= began:
        raise EnvironmentFailure(failure.read_text())


def _make_ours(folder: Path) -> None:
    """Libraries run with the user's rights, so only the user may write to the folder."""
    atomic.make_private_directory(folder)
    ownership.check(folder)
