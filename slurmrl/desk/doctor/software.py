"""Versions of software, without importing it: login nodes must not import torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slurmrl.desk.doctor.check import Check, failed, ok, warning
from slurmrl.desk.provenance import interpreter, torch_build, version_of
from slurmrl.errors import OwnershipError
from slurmrl.plan.precision import slow_bfloat16
from slurmrl.tensors.ops.native import build
from slurmrl.tensors.ops.native.recipe import Half
from slurmrl.tensors.parallel.gpu import LEAST_DRIVER, driver_version, newest_cuda

LEAST_PYTHON = (3, 11)
NEEDED = ("torch", "transformers", "safetensors", "numpy")
OPTIONAL = {"megatron-core": "backend megatron", "flash-attn": "faster attention"}
"""Servers of ``rollout.backend`` have environments of their own (`desk/doctor/servers.py`)."""
BUILDS = {12: "cu126", 13: "cu130"}
"""For each release of CUDA, a build of torch that scripts/setup can install."""


def python() -> Check:
    known = interpreter()
    measured = f"{known['python']} ({known['executable']})"
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
    return [ok("packages", measured), *([torch_on_gpus()] if gpus else [])]


def torch_on_gpus() -> Check:
    """Whether the installed torch can use the GPUs of this host, as far as versions say."""
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
        return ok(name, measured)  # the check of the driver reports that
    if newest < release:
        advice = f"scripts/setup --torch {fitting}"
        if least := LEAST_DRIVER.get(release):
            advice += f", or a driver of branch {least} or newer on these hosts"
        return failed(name, f"{measured}; driver {driver} serves CUDA {newest}", advice)
    return ok(name, f"{measured}, which driver {driver} serves")


def optional_packages() -> Check:
    """Optional packages. A configuration that needs a missing one is refused elsewhere."""
    shown = [
        f"{name} {version}" if (version := version_of(name)) else f"{name} not installed ({use})"
        for name, use in OPTIONAL.items()
    ]
    return ok("optional packages", ", ".join(shown))


def operators() -> Check:
    """Whether the compiled operators for CPUs are in the cache, so that no job compiles them."""
    folder = build.cache_folder()
    try:
        built = build.ready_made(Half.CPU, folder)
    except OwnershipError as error:
        return failed("compiled operators", str(error), "set SLURMRL_OPS_CACHE to your own folder")
    if built:
        return ok("compiled operators", f"in {folder}")
    measured = f"none in {folder}: the first job compiles them, which takes 20 to 90 s"
    return ok("compiled operators", f"{measured}; to do so before: {build.COMMAND}")


def processor(models: Sequence[str]) -> list[Check]:
    """Check if this host's processor has instructions for ``models``.

    The models compute in bfloat16 on processors.
    """
    if not models:
        return []
    if slow := slow_bfloat16(models):
        return [warning("processor", slow, "set dtype: float32 (the default on CPUs)")]
    return [ok("processor", f"nothing known against bfloat16 ({', '.join(models)})")]


def driver(gpus: bool) -> Check:
    """The NVIDIA driver and the newest CUDA that it can serve."""
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
    """Whether the hosts of a job have the software that the login node has."""
    expected = {one.name: one.measured for one in login if one.name in ("python", "packages")}
    others = [one for one in hosts if expected.get(one.name, one.measured) != one.measured]
    if not others:
        return []
    measured = "; ".join(f"{one.where}: {one.name} {one.measured}" for one in others)
    advice = "the batch script must find the same environment: see cluster.slurm.setup"
    return [warning("same software", measured, advice)]
