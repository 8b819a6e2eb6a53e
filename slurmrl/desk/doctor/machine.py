"""Checks of one host: its software, limits and GPUs, and Slurm's commands on it.

The checks do not import packages, because login nodes must not import torch.
"""

from __future__ import annotations

import re
import resource
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurmrl import env
from slurmrl.desk.doctor import Check, failed, ok, warning
from slurmrl.desk.provenance import interpreter, torch_build, version_of
from slurmrl.errors import OwnershipError, SchedulerError
from slurmrl.plan.precision import slow_bfloat16
from slurmrl.scheduler.client import SlurmClient
from slurmrl.tensors.ops.native import libraries
from slurmrl.tensors.ops.native.libraries import Half
from slurmrl.tensors.parallel import gpu
from slurmrl.tensors.parallel.gpu import (
    LEAST_DRIVER,
    Device,
    DeviceKind,
    driver_version,
    newest_cuda,
    parse_visible,
)

LEAST_PYTHON = (3, 11)
NEEDED = ("torch", "transformers", "safetensors", "numpy")
OPTIONAL = {"megatron-core": "backend megatron", "flash-attn": "faster attention"}
"""Optional packages and their uses. Servers of ``rollout.backend`` have separate environments (see
`server_checks`)."""
BUILDS = {12: "cu126", 13: "cu130"}
"""Mapping from a major version of CUDA to a build of torch that scripts/setup can install."""
FEW_FILES = 4096
"""Minimum limit of open files: a worker with NCCL needs some hundred descriptors."""
FEW_PROCESSES = 2048
"""Minimum limit of processes, which includes threads: a worker has about a hundred."""
_LINE = re.compile(r"GPU (\d+): .*\(UUID: (GPU-[0-9A-Fa-f-]+)\)")
GPU_ADVICE = (
    "look at 'scontrol show node' for the site's name of GPUs and set cluster.slurm.gpu_directive "
    "and gpu_type"
)
SLURM_TIMEOUT_S = 20.0


def python() -> Check:
    known = interpreter()
    measured = f"{known['python']} ({known['executable']})"
    if sys.version_info < LEAST_PYTHON:
        return failed("python", measured, "install slurmrl with Python 3.11 or newer")
    return ok("python", measured)


def packages(gpus: bool) -> list[Check]:
    """Check the installed packages; ``gpus`` says whether the workers compute on GPUs."""
    versions = {name: version_of(name) for name in NEEDED}
    missing = [name for name, version in versions.items() if version is None]
    measured = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    if missing:
        return [failed("packages", measured, f"pip install {' '.join(missing)}")]
    return [ok("packages", measured), *([torch_on_gpus()] if gpus else [])]


def torch_on_gpus() -> Check:
    """Check by the versions whether the installed torch works with the GPU driver of this host."""
    name, build, driver = "torch on gpus", torch_build(), driver_version()
    if build is None:
        return failed(name, "torch cannot be found", "pip install torch")
    newest = newest_cuda(driver) if driver is not None else None
    fitting = BUILDS.get(newest or 0, "cuda")
    if not build.gpus:
        advice = f"install a CUDA build (scripts/setup --torch {fitting}), or gpus_per_worker: 0"
        return failed(name, f"torch {build.version}, for CPUs only", advice)
    if build.cuda is None:
        return ok(name, f"torch {build.version}")
    measured = f"torch {build.version} is built for CUDA {build.cuda}"
    release = int(build.cuda.partition(".")[0])
    if driver is None or newest is None:
        return ok(name, measured)  # another check reports a missing driver
    if newest < release:
        advice = f"scripts/setup --torch {fitting}"
        if least := LEAST_DRIVER.get(release):
            advice += f", or a driver of branch {least} or newer on these hosts"
        return failed(name, f"{measured}; driver {driver} serves CUDA {newest}", advice)
    return ok(name, f"{measured}, which driver {driver} serves")


def optional_packages() -> Check:
    """List the optional packages; another check rejects a configuration that lacks a package."""
    shown = [
        f"{name} {version}" if (version := version_of(name)) else f"{name} not installed ({use})"
        for name, use in OPTIONAL.items()
    ]
    return ok("optional packages", ", ".join(shown))


def operators(variables: Mapping[str, str]) -> Check:
    """Check whether the compiled operators for CPUs are in the cache, so that no job compiles them.

    ``variables`` are the environment variables of the configuration: jobs do not inherit the
    cache's folder from a shell.
    """
    home = variables.get(env.XDG_CACHE_HOME.name) or Path("~/.cache").expanduser()
    folder = Path(variables.get(env.OPS_CACHE.name) or f"{home}/slurmrl/ops")
    try:
        built = libraries.ready_made(Half.CPU, folder)
    except OwnershipError as error:
        advice = "set SLURMRL_OPS_CACHE in cluster.env to your own folder"
        return failed("compiled operators", str(error), advice)
    if built:
        return ok("compiled operators", f"in {folder}")
    measured = f"none in {folder}: the first job compiles them, which takes 20 to 90 s"
    command = f"{env.OPS_CACHE.name}={folder} {libraries.COMMAND}"
    return ok("compiled operators", f"{measured}; to compile them now: {command}")


def processor(models: Sequence[str]) -> list[Check]:
    """Check whether the processor has instructions for ``models``, which compute in bfloat16."""
    if not models:
        return []
    if slow := slow_bfloat16(models):
        return [warning("processor", slow, "set dtype: float32 (the default on CPUs)")]
    return [ok("processor", f"no known problem with bfloat16 ({', '.join(models)})")]


def driver(gpus: bool) -> Check:
    """Check the NVIDIA driver; ``gpus`` says whether the job needs one."""
    version = driver_version()
    if version is None and gpus:
        advice = "the job needs hosts with GPUs: set cluster.slurm.partition or gpu_type"
        return failed("gpu driver", "no NVIDIA driver is loaded here", advice)
    if version is None:
        return ok("gpu driver", "none is loaded here")
    newest = newest_cuda(version)
    serves = f", serves builds for CUDA {newest} and older" if newest else ""
    return ok("gpu driver", f"NVIDIA {version}{serves}")


def same_everywhere(login: list[Check], hosts: list[Check]) -> list[Check]:
    """Check that the hosts of a job have the software of the login node."""
    expected = {one.name: one.measured for one in login if one.name in ("python", "packages")}
    others = [one for one in hosts if expected.get(one.name, one.measured) != one.measured]
    if not others:
        return []
    measured = "; ".join(f"{one.where}: {one.name} {one.measured}" for one in others)
    advice = "the batch script must find the same environment: see cluster.slurm.setup"
    return [warning("same software", measured, advice)]


Limit = Callable[[int], tuple[int, int]]


def process_limits(getrlimit: Limit = resource.getrlimit) -> list[Check]:
    """Check the limits of open files and of processes."""
    files, processes = getrlimit(resource.RLIMIT_NOFILE), getrlimit(resource.RLIMIT_NPROC)
    return [
        _limit("open files", files, FEW_FILES, "ulimit -n", "LimitNOFILE"),
        _limit("processes", processes, FEW_PROCESSES, "ulimit -u", "LimitNPROC"),
    ]


def _limit(name: str, limits: tuple[int, int], few: int, command: str, of_slurmd: str) -> Check:
    soft, hard = limits
    advice = (
        f"put '{command} 65536' into cluster.slurm.setup, or ask for a higher limit ({of_slurmd} "
        "of slurmd, PropagateResourceLimits)"
    )
    measured = f"limit {_number(soft)} (hard {_number(hard)})"
    if soft != resource.RLIM_INFINITY and soft < few:
        return warning(name, f"{measured}, below {few}", advice, limit=float(soft))
    return ok(name, measured, limit=float(soft))


def _number(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def granted_gpus(expected: int, visible: str, seen: list[str] | None) -> Check:
    """Check the GPUs of a host against the expected number.

    ``visible`` is CUDA_VISIBLE_DEVICES. ``seen`` are the UUIDs that nvidia-smi lists, in the order
    of their indices; None without such a tool. Raises EnvironmentFailure for a value of
    CUDA_VISIBLE_DEVICES that cannot be parsed.
    """
    given = parse_visible(visible)
    names = ",".join(device.text for device in given) or "none"
    there = "nvidia-smi is not here" if seen is None else f"nvidia-smi sees {len(seen)}"
    measured = f"{expected} requested, granted {names}; {there}"
    values = {"asked": float(expected), "given": float(len(given))}
    if len(given) < expected:
        return failed("gpus", measured, f"the job got too few GPUs: {GPU_ADVICE}", **values)
    unseen = [device.text for device in given if seen is not None and not _is_seen(device, seen)]
    if unseen:
        advice = "the driver does not show the granted GPUs: report the host and set slurm.exclude"
        return failed("gpus", f"{measured}, but not {', '.join(unseen)}", advice, **values)
    if seen is not None and expected and len(seen) > len(given):
        advice = (
            "devices are not confined (ConstrainDevices): other jobs may use the GPUs of slurmrl's "
            "jobs"
        )
        return warning("gpus", measured, advice, **values)
    return ok("gpus", measured, **values)


def _is_seen(device: Device, seen: list[str]) -> bool:
    if device.kind is DeviceKind.INDEX:
        return int(device.text) < len(seen)
    return device.kind is DeviceKind.MIG or any(one.startswith(device.text) for one in seen)


def listed_gpus(text: str) -> list[str]:
    """Return the UUIDs in the output of ``nvidia-smi -L``."""
    return [match[2] for match in map(_LINE.match, text.splitlines()) if match]


def seen_gpus() -> list[str] | None:
    """Return the UUIDs of all GPUs of this host; None without nvidia-smi."""
    if shutil.which(gpu.SMI) is None:
        return None
    return listed_gpus(gpu.nvidia_smi("-L") or "")


def slurm_version() -> Check:
    """Check that Slurm's commands work, and report their version. Raises SchedulerError."""
    return ok("slurm version", SlurmClient(timeout_s=SLURM_TIMEOUT_S).version())


def controller() -> Check:
    """Check that Slurm's controller answers. Raises SchedulerError."""
    SlurmClient(timeout_s=SLURM_TIMEOUT_S).ping()
    return ok("scontrol", "the controller answers")


def slurm_in_jobs(script: Path) -> list[Check]:
    """Check the commands with which a run adds and cancels links.

    ``script`` is a batch script that sbatch has accepted before; nothing is submitted.
    """
    client = SlurmClient(timeout_s=SLURM_TIMEOUT_S)
    checks = []
    try:
        client.ping()
        checks.append(ok("scontrol in jobs", "works"))
    except SchedulerError as error:
        advice = "runs work, but only the login node can report why a job ended"
        checks.append(warning("scontrol in jobs", str(error), advice))
    try:
        client.try_out(script)
        checks.append(ok("sbatch in jobs", "works: a run adds links to its chain itself"))
    except SchedulerError as error:
        advice = (
            "a run cannot add links: set cluster.slurm.links high enough, or use slurmrl resume"
        )
        checks.append(warning("sbatch in jobs", str(error), advice))
    return checks
