"""The sources, compilers and flags of a half of the operators, and the cache key they give."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import sysconfig
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path, PurePath

from slurmrl import env, package
from slurmrl.errors import EnvironmentFailure

SOURCES = "cuda"
"""A link to the repository's ``cuda/``; a folder of the wheel."""

ABI_TARGET = "0x020b000000000000"
"""The oldest torch (2.11) whose stable ABI has the functions that the bindings call."""

CXX_FLAGS = ("-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra")
"""No fused multiply-adds: they round differently from torch."""
NVCC_FLAGS = (
    "-O3",
    "--threads=0",
    "-std=c++17",
    "-Werror",
    "all-warnings",
    "-Xcompiler",
    "-fPIC,-Wall",
)


_NONE: tuple[str, ...] = ()


ARCHITECTURES = ("80", "90", "100")
"""A100, H100 and B200. Other GPUs of these generations run the same code, newer ones the PTX."""
ASK_TIMEOUT_S = 60.0
NO_CXX = "install one (Debian, Ubuntu: apt-get install g++) or set CXX to its path"
NO_NVCC = (
    "install the CUDA toolkit, or into this environment: pip install nvidia-cuda-nvcc "
    "nvidia-cuda-runtime nvidia-cuda-crt nvidia-nvvm nvidia-cuda-cccl; or set CUDA_HOME to its "
    "folder"
)


@dataclass(frozen=True)
class Toolchain:
    """Paths of the compilers; empty if missing."""

    cxx: str
    nvcc: str

    def cxx_version(self) -> str:
        """The C++ compiler's version. Raises EnvironmentFailure if there is none."""
        if not self.cxx:
            raise EnvironmentFailure(f"there is no C++ compiler here: {NO_CXX}")
        return _ask(self.cxx, "--version").partition("\n")[0]

    def nvcc_version(self) -> str:
        """Return the version of nvcc. Raises EnvironmentFailure if there is none."""
        if not self.nvcc:
            raise EnvironmentFailure(f"there is no nvcc here: {NO_NVCC}")
        return " ".join(_ask(self.nvcc, "--version").split())

    def architecture_flags(self) -> tuple[str, ...]:
        """Machine code for the ``ARCHITECTURES`` that nvcc supports, and PTX for the newest."""
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
        """The toolkit's folder as nvcc reports it; the nvcc on PATH may be a wrapper script."""
        plan = _ask(self.nvcc, "--dryrun", "-x", "cu", "/dev/null", "-o", "/dev/null", stderr=True)
        top = next(line.partition("TOP=")[2] for line in plan.splitlines() if "TOP=" in line)
        return Path(top.strip()).resolve()


class Half(StrEnum):
    """The devices that a library is for."""

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
"""The compiled files; headers are in the same folders."""


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a library, apart from the files' contents."""

    half: Half
    sources: tuple[str, ...]
    """Names among those of `inputs`."""
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
        """The cache key: independent of the folder and of the torch release."""
        text = asdict(self) | {"sources": None, "nvcc": None, "cuda_home": None}
        digest = hashlib.sha256(json.dumps(text, sort_keys=True).encode())
        return f"{stem(self.half)}-{digest.hexdigest()[:16]}"


def stem(half: Half) -> str:
    """Return the prefix of a half's keys, which does not depend on the compilers.

    It has a digest of sources, flags, ABI target and the processor's architecture. Raises
    EnvironmentFailure if the sources are missing.
    """
    flags = (CXX_FLAGS, NVCC_FLAGS, ABI_TARGET, platform.machine())
    digest = hashlib.sha256(json.dumps(flags).encode())
    for name, content in inputs(half).items():
        digest.update(f"{name} ".encode())
        digest.update(hashlib.sha256(content).digest())
    return f"slurmrl_{half}-{digest.hexdigest()[:16]}"


def make(half: Half, toolchain: Toolchain) -> Recipe:
    """The recipe of a half on this machine. Raises EnvironmentFailure if a compiler is missing."""
    cxx_version = toolchain.cxx_version()
    versions = [cxx_version, " ".join(platform.libc_ver()), platform.machine()]
    nvcc, nvcc_flags, home = "", _NONE, ""
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
    """The half's own files and the shared headers by name, in a fixed order.

    Raises EnvironmentFailure if they are missing.
    """
    own = f"{SOURCES}/{PurePath(FILES[half][0]).parent}"
    try:
        shared = [name for name in package.names(SOURCES) if name.endswith(".h")]
        chosen = sorted(map(PurePath, [*shared, *package.names(own)]))
        return {str(path.relative_to(SOURCES)): package.read(str(path)) for path in chosen}
    except OSError as error:
        raise EnvironmentFailure(f"the operators' sources are missing: {error}") from error


def find_toolchain() -> Toolchain:
    """Return the compilers set by CXX and CUDA_HOME, or those found.

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
