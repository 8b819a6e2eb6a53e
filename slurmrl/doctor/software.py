"""Versions of software, without importing it: login nodes must not import torch."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from slurmrl.doctor.check import Check, failed, ok, warning
from slurmrl.errors import SchedulerError
from slurmrl.scheduler.client import SlurmClient
from slurmrl.submission.versions import interpreter, version_of

LEAST_PYTHON = (3, 11)
NEEDED = ("torch", "transformers", "safetensors", "numpy")
OPTIONAL = {
    "megatron-core": "backend megatron",
    "sglang": "rollout by sglang",
    "vllm": "rollout by vllm",
    "flash-attn": "faster attention",
}
DRIVER = Path("/proc/driver/nvidia/version")
TIMEOUT_S = 20.0


def python() -> Check:
    found = interpreter()
    measured = f"{found['python']} ({found['executable']})"
    if sys.version_info < LEAST_PYTHON:
        return failed("python", measured, "install slurmrl with Python 3.11 or newer")
    return ok("python", measured)


def packages(gpus: bool) -> list[Check]:
    """``gpus``: whether the workers compute on GPUs."""
    versions = {name: version_of(name) for name in NEEDED}
    missing = [name for name, version in versions.items() if version is None]
    measured = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    if missing:
        return [failed("packages", measured, f"pip install {' '.join(missing)}")]
    found = [ok("packages", measured)]
    if gpus and (versions["torch"] or "").endswith("+cpu"):
        advice = "install torch built for CUDA (pytorch.org/get-started), or gpus_per_worker: 0"
        found.append(failed("torch on gpus", f"torch {versions['torch']}, for CPUs only", advice))
    return found


def optional_packages() -> Check:
    """Optional packages. A configuration that needs a missing one is refused elsewhere."""
    found = [
        f"{name} {version}" if (version := version_of(name)) else f"{name} not installed ({use})"
        for name, use in OPTIONAL.items()
    ]
    return ok("optional packages", ", ".join(found))


def slurm() -> Check:
    """Raises SchedulerError."""
    return ok("slurm version", SlurmClient(timeout_s=TIMEOUT_S).version())


def driver(gpus: bool) -> Check:
    """The NVIDIA driver and the newest CUDA that it can serve."""
    try:
        text = DRIVER.read_text()
    except OSError:
        if gpus:
            advice = "the job needs hosts with GPUs: set cluster.slurm.partition or gpu_type"
            return failed("gpu driver", "no NVIDIA driver is loaded here", advice)
        return ok("gpu driver", "none is loaded here")
    version = re.search(r"Kernel Module\D*([\d.]+)", text)
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", _nvidia_smi())
    name = f"NVIDIA {version[1] if version else 'driver of unknown version'}"
    return ok("gpu driver", f"{name}, CUDA up to {cuda[1]}" if cuda else name)


def same_everywhere(login: list[Check], hosts: list[Check]) -> list[Check]:
    """Whether the hosts of a job have the software that the login node has."""
    expected = {one.name: one.measured for one in login if one.name in ("python", "packages")}
    others = [one for one in hosts if expected.get(one.name, one.measured) != one.measured]
    if not others:
        return []
    measured = "; ".join(f"{one.where}: {one.name} {one.measured}" for one in others)
    advice = "the batch script must find the same environment: see cluster.slurm.setup"
    return [warning("same software", measured, advice)]


def _nvidia_smi() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(
            ["nvidia-smi"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def controller() -> Check:
    """Raises SchedulerError where no controller answers."""
    try:
        SlurmClient(timeout_s=TIMEOUT_S).ping()
    except SchedulerError as error:
        return failed("scontrol", str(error), "see whether Slurm's commands work in your shell")
    return ok("scontrol", "the controller answers")
