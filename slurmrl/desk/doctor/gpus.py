"""GPUs that the scheduler allocated, compared with those that are visible."""

from __future__ import annotations

import re
import shutil

from slurmrl.desk.doctor.check import Check, failed, ok, warning
from slurmrl.tensors.parallel import gpu
from slurmrl.tensors.parallel.gpu import Device, DeviceKind, parse_visible

_LINE = re.compile(r"GPU (\d+): .*\(UUID: (GPU-[0-9A-Fa-f-]+)\)")
ADVICE = (
    "look at 'scontrol show node' for the site's name of GPUs and set cluster.slurm.gpu_directive "
    "and gpu_type"
)


def check(expected: int, visible: str, seen: list[str] | None) -> Check:
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
        return failed("gpus", measured, f"the job got too few: {ADVICE}", **values)
    unseen = [device.text for device in given if seen is not None and not _is_seen(device, seen)]
    if unseen:
        advice = (
            "the driver does not show what Slurm granted: report the host and set slurm.exclude"
        )
        return failed("gpus", f"{measured}; not {', '.join(unseen)}", advice, **values)
    if seen is not None and expected and len(seen) > len(given):
        advice = (
            "devices are not confined (ConstrainDevices): slurmrl keeps to its own, but other jobs "
            "may use them"
        )
        return warning("gpus", measured, advice, **values)
    return ok("gpus", measured, **values)


def _is_seen(device: Device, seen: list[str]) -> bool:
    if device.kind is DeviceKind.INDEX:
        return int(device.text) < len(seen)
    return device.kind is DeviceKind.MIG or any(one.startswith(device.text) for one in seen)


def listed(text: str) -> list[str]:
    """UUIDs in the output of ``nvidia-smi -L``."""
    return [match[2] for match in map(_LINE.match, text.splitlines()) if match]


def seen() -> list[str] | None:
    """UUIDs of the GPUs here, whatever CUDA_VISIBLE_DEVICES says; None without nvidia-smi."""
    if shutil.which(gpu.SMI) is None:
        return None
    return listed(gpu.nvidia_smi("-L") or "")
