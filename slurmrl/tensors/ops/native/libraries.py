"""Libraries of the operators: recipe (sources, compilers, flags), build, and cache.

Hosts may share the cache. On each host, a file lock on the local disk lets one process build while
the others wait. The kernel releases the lock when its holder dies. Hosts do not wait for each
other: the first host that finishes publishes its library, by exclusive creation of a whole file,
and the other hosts use this library.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path, PurePath

from filelock import FileLock, Timeout

from slurmrl import env, log, package
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio import atomic

logger = log.get(__name__)

COMMAND = "python -m slurmrl.tensors.ops.native"
"""Command that compiles the operators ahead of time."""
BUILD_TIMEOUT_S = 3600.0
"""Time limit of a build, which takes 90 s on an idle machine and much longer on a busy one."""
LOCK_TIMEOUT_S = 2 * BUILD_TIMEOUT_S
"""Time limit for waiting for the lock: twice the time limit of a build."""
PROGRAM = "tensors/ops/native/compile.py"
LOG_LINES = 30
SOURCES = "cuda"
"""Folder of the sources: a link to the repository's ``cuda/``, or a folder of the wheel."""

ABI_TARGET = "0x020b000000000000"
"""First torch release (2.11) whose stable ABI has the functions that the bindings call."""

CXX_FLAGS = ("-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra")
"""Flags of the C++ compiler. Fused multiply-adds are off, because they round differently from
torch."""
NVCC_FLAGS = (
    "-O3",
    "--threads=0",
    "-std=c++17",
    "-Werror",
    "all-warnings",
    "-Xcompiler",
    "-fPIC,-Wall",
)

ARCHITECTURES = ("80", "90", "100")
"""Architectures of A100, H100 and B200. On newer GPUs, the driver compiles the PTX."""
ASK_TIMEOUT_S = 60.0
NO_CXX = "install one (Debian, Ubuntu: apt-get install g++) or set CXX to its path"
NO_NVCC = (
    "install the CUDA toolkit, or run in this environment: pip install nvidia-cuda-nvcc "
    "nvidia-cuda-runtime nvidia-cuda-crt nvidia-nvvm nvidia-cuda-cccl; or set CUDA_HOME to its "
    "folder"
)


@dataclass(frozen=True)
class Toolchain:
    """Paths of the compilers; "" for a missing compiler."""

    cxx: str
    nvcc: str

    def cxx_version(self) -> str:
        """Return the C++ compiler's version. Raises EnvironmentFailure if there is none."""
        if not self.cxx:
            raise EnvironmentFailure(f"this host has no C++ compiler: {NO_CXX}")
        return _ask(self.cxx, "--version").partition("\n")[0]

    def nvcc_version(self) -> str:
        """Return the version of nvcc. Raises EnvironmentFailure if there is none."""
        if not self.nvcc:
            raise EnvironmentFailure(f"this host has no nvcc: {NO_NVCC}")
        return " ".join(_ask(self.nvcc, "--version").split())

    def architecture_flags(self) -> tuple[str, ...]:
        """Return flags for machine code of supported `ARCHITECTURES`, and PTX of the newest."""
        known = _ask(self.nvcc, "--list-gpu-code").split()
        chosen = [number for number in ARCHITECTURES if f"sm_{number}" in known]
        if not chosen:
            wanted = ", ".join(f"sm_{number}" for number in ARCHITECTURES)
            raise EnvironmentFailure(
                f"{self.nvcc} supports none of {wanted}, only {' '.join(known)}"
            )
        code = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in chosen]
        return (*code, f"-gencode=arch=compute_{chosen[-1]},code=compute_{chosen[-1]}")

    def cuda_home(self) -> Path:
        """Return the toolkit's folder as nvcc reports it; nvcc on PATH may be a wrapper script."""
        plan = _ask(self.nvcc, "--dryrun", "-x", "cu", "/dev/null", "-o", "/dev/null", stderr=True)
        top = next(line.partition("TOP=")[2] for line in plan.splitlines() if "TOP=" in line)
        return Path(top.strip()).resolve()


class Half(StrEnum):
    """The devices for which a library is built."""

    CPU = "cpu"
    CUDA = "cuda"


FILES: dict[Half, tuple[str, ...]] = {
    Half.CPU: (
        "cpu/binding.cpp",
        "cpu/scan.cpp",
        "cpu/intervals.cpp",
        "cpu/paged.cpp",
        "cpu/rows.cpp",
        "cpu/products.cpp",
        "cpu/layer.cpp",
    ),
    Half.CUDA: ("gpu/binding.cpp", "gpu/scan.cu", "gpu/intervals.cu"),
}
"""Files that are compiled; headers are in the same folders."""


@dataclass(frozen=True)
class Recipe:
    """All facts that determine a library, except the contents of the files."""

    half: Half
    sources: tuple[str, ...]
    """Names of the `inputs` that are compiled."""
    cxx: str
    cxx_flags: tuple[str, ...]
    nvcc: str
    nvcc_flags: tuple[str, ...]
    cuda_home: str
    versions: tuple[str, ...]
    """Versions of the compilers and the C library, and the processor's architecture."""

    @property
    def name(self) -> str:
        return f"slurmrl_{self.half}"

    @property
    def key(self) -> str:
        """Cache key, which depends neither on folders nor on the torch release."""
        text = asdict(self) | {"sources": None, "nvcc": None, "cuda_home": None}
        digest = hashlib.sha256(json.dumps(text, sort_keys=True).encode())
        return f"{stem(self.half)}-{digest.hexdigest()[:16]}"


def stem(half: Half) -> str:
    """Return the prefix of a half's keys, which does not depend on the compilers.

    The prefix has a digest of sources, flags, ABI target and the processor's architecture. Raises
    EnvironmentFailure if the sources are missing.
    """
    flags = (CXX_FLAGS, NVCC_FLAGS, ABI_TARGET, platform.machine())
    digest = hashlib.sha256(json.dumps(flags).encode())
    for name, content in inputs(half).items():
        digest.update(f"{name} ".encode())
        digest.update(hashlib.sha256(content).digest())
    return f"slurmrl_{half}-{digest.hexdigest()[:16]}"


def make(half: Half, toolchain: Toolchain) -> Recipe:
    """Return the recipe of a half on this host. Raises EnvironmentFailure without a compiler."""
    cxx_version = toolchain.cxx_version()
    versions = [cxx_version, " ".join(platform.libc_ver()), platform.machine()]
    nvcc, home = "", ""
    nvcc_flags: tuple[str, ...] = ()
    if half is Half.CUDA:
        versions.append(toolchain.nvcc_version())
        nvcc, home = toolchain.nvcc, str(toolchain.cuda_home())
        nvcc_flags = (*NVCC_FLAGS, *toolchain.architecture_flags())
    return Recipe(
        half=half,
        sources=FILES[half],
        cxx=toolchain.cxx,
        cxx_flags=(*CXX_FLAGS, f"-DTORCH_TARGET_VERSION={ABI_TARGET}"),
        nvcc=nvcc,
        nvcc_flags=nvcc_flags,
        cuda_home=home,
        versions=tuple(versions),
    )


def inputs(half: Half) -> dict[str, bytes]:
    """Return a mapping from names to the half's files and shared headers, in a fixed order.

    Raises EnvironmentFailure if files are missing.
    """
    own = f"{SOURCES}/{PurePath(FILES[half][0]).parent}"
    try:
        shared = [name for name in package.names(SOURCES) if name.endswith(".h")]
        chosen = sorted(map(PurePath, [*shared, *package.names(own)]))
        return {str(path.relative_to(SOURCES)): package.read(str(path)) for path in chosen}
    except OSError as error:
        raise EnvironmentFailure(f"the operators' sources are missing: {error}") from error


def find_toolchain() -> Toolchain:
    """Return the compilers that CXX and CUDA_HOME name; else the first compilers found.

    The search covers PATH, the toolkit's usual folder and this environment's packages.
    """
    return Toolchain(shutil.which(env.CXX.get()) or "", _find_nvcc())


def _find_nvcc() -> str:
    home = env.CUDA_HOME.get()
    if home:
        return shutil.which("nvcc", path=f"{home}/bin") or ""
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    folders = [Path("/usr/local/cuda/bin"), *sorted(packages.glob("cu[0-9]*/bin"), reverse=True)]
    places = (shutil.which("nvcc", path=path) for path in (None, *map(str, folders)))
    return next((place for place in places if place), "")


def _ask(program: str, *arguments: str, stderr: bool = False) -> str:
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=ASK_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFailure(f"{program} does not run: {error}") from error
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip()
        raise EnvironmentFailure(f"{program} {' '.join(arguments)} failed: {reason}")
    return done.stderr if stderr else done.stdout


Compile = Callable[[Recipe, Path], Path]
"""Function that compiles a recipe in an empty folder and returns the library."""
Building = Callable[[], AbstractContextManager[object]]
building: ContextVar[Building] = ContextVar("building", default=nullcontext)
"""Function that returns the context in which a process builds or waits for a build. A rank replaces
this function, so that `status` shows the wait."""


def cache_folder() -> Path:
    """Return SLURMRL_OPS_CACHE, or ``slurmrl/ops`` in the user's cache folder."""
    chosen = env.OPS_CACHE.get()
    if chosen:
        return Path(chosen).absolute()
    return env.cache_folder("ops")


def host_folder() -> Path:
    """Return a private folder on this host's local disk, for locks and unfinished builds."""
    return Path(tempfile.gettempdir()) / f"slurmrl-ops-{os.getuid()}"


def library(recipe: Recipe, cache: Path, host: Path, *, run: Compile | None = None) -> Path:
    """Return the library of a recipe; build and publish it if the cache lacks it.

    Raises EnvironmentFailure if the library cannot be built, OwnershipError if other users can
    write to the cache.
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
    """Return cached libraries of any compiler, newest first, for hosts without a compiler."""
    if not cache.is_dir():
        return []
    atomic.check_ownership(cache)
    libraries = cache.glob(f"{stem(half)}-*.so")
    return sorted(libraries, key=lambda path: path.stat().st_mtime, reverse=True)


def run_compiler(recipe: Recipe, folder: Path) -> Path:
    """Compile in a separate process that also loads the result as a test. Return the library.

    Raises EnvironmentFailure with the end of the compiler's output.
    """
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environ = {**os.environ, "PATH": search, "CXX": recipe.cxx}  # ninja is next to python.
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
    """Build and publish a library. The caller holds the lock of this host."""
    for leftover in host.glob(f"{recipe.key}.build.*"):  # A killed process left the folder.
        shutil.rmtree(leftover, ignore_errors=True)
    atomic.sweep_temporaries(path.parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{recipe.key}.build.", dir=host))
    logger.info(
        "compiling the operators of slurmrl into %s (20 to 90 s, once for this cache); to compile "
        "them before a job, run: %s",
        path,
        COMMAND,
    )
    began = time.monotonic()
    try:
        built = run(recipe, folder).read_bytes()
        logger.info("compiled the operators in %.0f s", time.monotonic() - began)
        # If another host has published first, keep its library of the same recipe.
        atomic.exclusive_create(path, built)
    except EnvironmentFailure as error:
        _failure(recipe, host).write_text(str(error))
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _failure(recipe: Recipe, host: Path) -> Path:
    """Return the path of the file with the error of this host's last failed build."""
    return host / f"{recipe.key}.failure"


def _raise_if_failed(failure: Path, began: float) -> None:
    """If a build has failed while this process waited, raise its error; do not build again."""
    if failure.exists() and failure.stat().st_mtime >= began:
        raise EnvironmentFailure(failure.read_text())


def _make_ours(folder: Path) -> None:
    """Make a folder to which only the user can write. Libraries run with the user's rights."""
    atomic.make_private_directory(folder)
    atomic.check_ownership(folder)
