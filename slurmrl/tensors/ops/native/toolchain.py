"""The compilers of this machine."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from slurmrl import env
from slurmrl.errors import EnvironmentFailure

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
        """nvcc's version. Raises EnvironmentFailure if there is none."""
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


def find() -> Toolchain:
    """The compilers set by CXX and CUDA_HOME; else those on PATH, in the toolkit's usual folder or
    in this environment's packages."""
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
