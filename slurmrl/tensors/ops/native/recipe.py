"""The sources, compilers and flags of a half of the operators, and the cache key they give."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import PurePath

from slurmrl import package
from slurmrl.errors import EnvironmentFailure
from slurmrl.tensors.ops.native.toolchain import Toolchain

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
    """The prefix of a half's keys, from all that does not depend on the compilers: sources, flags,
    ABI target and the processor's architecture.

    Raises EnvironmentFailure if the sources are missing.
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
