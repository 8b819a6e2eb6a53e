"""The NVIDIA driver of this host, from files and nvidia-smi. No torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

VERSION: Final = Path("/proc/driver/nvidia/version")
SMI: Final = "nvidia-smi"
TIMEOUT_S: Final = 20.0

LEAST_DRIVER: Final = {11: 450, 12: 525, 13: 580}
"""First branch of the driver that serves every minor version of a CUDA release (the tables "CUDA
minor version compatibility" of NVIDIA's release notes)."""


def driver_version() -> str | None:
    """Return the version of the loaded driver, such as ``535.54.03``; None if none is loaded."""
    try:
        text = VERSION.read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    return found[1] if found else "of unknown version"


def newest_cuda(version: str) -> int | None:
    """Return the newest CUDA release whose builds a driver of this version serves (10: none that
    torch still supports); None if the version is unknown. A newer libcuda (the package cuda-compat)
    counts, as nvidia-smi reports it."""
    branch = re.match(r"\d+", version)
    if branch is None:
        return None
    served = [cuda for cuda, least in LEAST_DRIVER.items() if int(branch[0]) >= least]
    loaded = re.search(r"CUDA Version:\s*(\d+)", nvidia_smi() or "")
    return max([10, *served, *([int(loaded[1])] if loaded else [])])


def nvidia_smi(*arguments: str) -> str | None:
    """Return the output of nvidia-smi; None if it is missing or fails."""
    if shutil.which(SMI) is None:
        return None
    try:
        done = subprocess.run(
            [SMI, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def compute_capability() -> float | None:
    """Return the lowest compute capability of this host's GPUs, 9.0 for Hopper; None if unknown."""
    text = nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader") or ""
    return min(map(float, re.findall(r"^\d+\.\d+$", text, re.M)), default=None)


def processes_on(gpu: str) -> list[str]:
    """Return what nvidia-smi says about the processes on a GPU (UUID or index): pid, name, memory.
    In a container it sees none."""
    text = nvidia_smi(
        f"--id={gpu}", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"
    )
    lines = (line.split(", ") for line in (text or "").splitlines())
    return [f"pid {words[0]} ({', '.join(words[1:])})" for words in lines if words[0].isdigit()]
