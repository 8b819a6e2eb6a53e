"""Assignment of a job's GPUs to the workers of a host."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from slurmrl.errors import EnvironmentFailure


class DeviceKind(StrEnum):
    INDEX = "index"
    UUID = "uuid"
    MIG = "mig"


_FORMS: Final = {
    DeviceKind.INDEX: re.compile(r"\d+"),
    DeviceKind.UUID: re.compile(r"GPU-[0-9A-Fa-f-]+"),
    DeviceKind.MIG: re.compile(r"MIG-(GPU-)?[0-9A-Fa-f-]+(/\d+/\d+)?"),
}


@dataclass(frozen=True)
class Device:
    """One entry of CUDA_VISIBLE_DEVICES. ``text`` is as it was written: UUIDs stay UUIDs, because
    an index means another GPU in another container."""

    text: str
    kind: DeviceKind


def parse_visible(visible: str) -> list[Device]:
    """The devices in a value of CUDA_VISIBLE_DEVICES: indices, ``GPU-…`` or ``MIG-…``.

    Empty, ``-1`` and ``NoDevFiles`` (what Slurm sets when it gave none) are no devices; CUDA
    ignores everything from ``-1`` on. Raises EnvironmentFailure for another form or a device listed
    twice.
    """
    devices: list[Device] = []
    for text in (part.strip() for part in visible.split(",")):
        if text in ("", "-1", "NoDevFiles"):
            break
        kind = next((kind for kind, form in _FORMS.items() if form.fullmatch(text)), None)
        if kind is None:
            raise EnvironmentFailure(
                f"CUDA_VISIBLE_DEVICES={visible!r}: {text!r} is not an index, GPU-… or MIG-…"
            )
        devices.append(Device(text, kind))
    names = [device.text for device in devices]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise EnvironmentFailure(
            f"CUDA_VISIBLE_DEVICES={visible!r}: {', '.join(twice)} is listed more than once"
        )
    return devices


def assign(visible: str, workers: int, per_worker: int, first: int = 0) -> list[str]:
    """The value of CUDA_VISIBLE_DEVICES for each worker of a host; empty for no device.

    Devices are assigned in the order given, from the one at ``first`` on. Raises EnvironmentFailure
    if there are too few, or for several workers on MIG slices, which cannot communicate over NCCL.
    """
    if per_worker == 0:
        return [""] * workers
    devices = parse_visible(visible)[first:]
    needed = workers * per_worker
    if len(devices) < needed:
        raise EnvironmentFailure(
            f"{workers} workers with {per_worker} GPU each need {needed} GPUs on this host, but "
            f"CUDA_VISIBLE_DEVICES={visible!r} gives {len(devices)}"
            + (f" behind the first {first}" if first else "")
        )
    if needed > 1 and any(device.kind is DeviceKind.MIG for device in devices[:needed]):
        raise EnvironmentFailure(
            f"CUDA_VISIBLE_DEVICES={visible!r} lists MIG slices, which cannot communicate "
            f"over NCCL: one worker can use one slice, {workers} workers need whole GPUs"
        )
    return [
        ",".join(device.text for device in devices[index * per_worker : (index + 1) * per_worker])
        for index in range(workers)
    ]
