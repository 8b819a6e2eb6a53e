"""A host's GPUs: assignment to workers, driver, nearest CPUs, and faults. Torch-free.

Host memory is allocated on the NUMA node of the thread that first writes to it. If a worker runs on
the CPUs of its GPU's node, copies between GPU and host therefore stay on that node.

Codes of faults come from cudaError_t in CUDA's driver_types.h, messages from cudaGetErrorString.
torch raises faults as AcceleratorError with ``error_code``; NCCL, cuBLAS and older versions of
torch only quote the message. There is no code for a lost GPU (Xid 79); NVML and the driver only
describe it. Errors of a kernel's own bug (illegal address, assert, illegal instruction) and lack of
memory are not faults.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from slurmrl import child
from slurmrl.errors import EnvironmentFailure

DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")
SMI: Final = "nvidia-smi"
TIMEOUT_S: Final = 20.0
MOST_BYTES: Final = 2**20
"""Maximum number of bytes that are read from nvidia-smi's output."""
LEAST_DRIVER: Final = {11: 450, 12: 525, 13: 580}
"""First branch of the driver that supports every minor version of a CUDA release (from the tables
"CUDA minor version compatibility" of NVIDIA's release notes)."""
SYSFS: Final = Path("/sys")
ADDRESS: Final = ("domain", "bus", "device")


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
    """One entry of CUDA_VISIBLE_DEVICES.

    ``text`` is the original string. UUIDs are not replaced by indices, because an index may mean
    another GPU in another container.
    """

    text: str
    kind: DeviceKind


def parse_visible(visible: str) -> list[Device]:
    """Return the devices in CUDA_VISIBLE_DEVICES: indices, ``GPU-…`` or ``MIG-…``.

    An empty value, ``-1`` and ``NoDevFiles`` (which Slurm sets for a job without GPUs) mean no
    devices. CUDA ignores all entries from ``-1`` on. Raises EnvironmentFailure for another form or
    a repeated device.
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
    """Return the value of CUDA_VISIBLE_DEVICES for each worker of a host; "" without devices.

    Devices are assigned in the order of ``visible``, from index ``first`` on. Raises
    EnvironmentFailure if there are too few devices, or for several workers on MIG slices, which
    cannot communicate over NCCL.
    """
    if per_worker == 0:
        return [""] * workers
    devices = parse_visible(visible)[first:]
    needed = workers * per_worker
    if len(devices) < needed:
        raise EnvironmentFailure(
            f"{workers} workers with {per_worker} GPU each need {needed} GPUs on this host, but "
            f"CUDA_VISIBLE_DEVICES={visible!r} gives {len(devices)}"
            + (f" after the first {first}" if first else "")
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


def driver_version() -> str | None:
    """Return the version of the loaded driver, such as ``535.54.03``; None if none is loaded."""
    try:
        text = DRIVER_FILE.read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    return found[1] if found else "of unknown version"


def newest_cuda(version: str) -> int | None:
    """Return the newest CUDA release that a driver of this version supports.

    Return 10 if the driver is too old for every release that torch supports, and None if the
    version is unknown. A newer libcuda (cuda-compat) counts, because nvidia-smi reports it.
    """
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
        done = child.run([SMI, *arguments], TIMEOUT_S, kept_bytes=MOST_BYTES)
    except OSError:
        return None
    return done.output.decode(errors="replace") if done.code == 0 else None


def compute_capability() -> float | None:
    """Return the lowest compute capability of this host's GPUs (Hopper: 9.0); None if unknown."""
    text = nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader") or ""
    return min(map(float, re.findall(r"^\d+\.\d+$", text, re.M)), default=None)


def processes_on(gpu: str) -> list[str]:
    """Return nvidia-smi's list of the processes on a GPU (UUID or index): pid, name, memory.

    The list is empty in a container.
    """
    text = nvidia_smi(
        f"--id={gpu}", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"
    )
    lines = (line.split(", ") for line in (text or "").splitlines())
    return [f"pid {words[0]} ({', '.join(words[1:])})" for words in lines if words[0].isdigit()]


@dataclass(frozen=True)
class GpuFault:
    words: str
    certain: bool = True
    """Whether only the hardware or the driver can cause the fault. Otherwise, a bug in a kernel may
    cause it on every host."""


_ECC: Final = GpuFault("uncorrectable ECC error")
_NVLINK: Final = GpuFault("uncorrectable NVLink error")
_GONE: Final = GpuFault("the device is lost")
_NOT_READY: Final = GpuFault("the driver or its fabric manager is not ready")
_MISMATCH: Final = GpuFault("the driver was replaced")
_CONTAINED: Final = GpuFault("contained error of memory or NVLink", certain=False)
_LAUNCH: Final = GpuFault("unspecified launch failure", certain=False)
_UNKNOWN: Final = GpuFault("unknown error", certain=False)

CODES: Final = {
    100: _GONE,  # cudaErrorNoDevice in a process that has used a device
    214: _ECC,  # cudaErrorECCUncorrectable
    220: _NVLINK,  # cudaErrorNvlinkUncorrectable
    226: _CONTAINED,  # cudaErrorContained
    719: _LAUNCH,  # cudaErrorLaunchFailure
    802: _NOT_READY,  # cudaErrorSystemNotReady
    803: _MISMATCH,  # cudaErrorSystemDriverMismatch
    999: _UNKNOWN,  # cudaErrorUnknown
}
_TEXTS: Final = {
    r"uncorrectable ECC error": _ECC,
    r"uncorrectable NVLink error": _NVLINK,
    r"fallen off the bus|\b(GPU|device)( is| was| has been)? lost\b": _GONE,
    r"no CUDA-capable device is detected": _GONE,
    r"\bXid\b": GpuFault("Xid", certain=False),
    r"system not yet initialized": _NOT_READY,
    r"unsupported display driver / cuda driver combination": _MISMATCH,
    r"invalid access of peer GPU memory over nvlink or a hardware error": _CONTAINED,
    r"unspecified launch failure": _LAUNCH,
    r"cuda (error|failure)[^a-z]{0,8}unknown error": _UNKNOWN,
}
TEXTS: Final = {re.compile(text, re.IGNORECASE): fault for text, fault in _TEXTS.items()}


def find_fault(error: BaseException) -> GpuFault | None:
    """Return the fault in an exception's code, else in its message; None if there is none."""
    if not isinstance(error, RuntimeError):
        return None
    code = getattr(error, "error_code", None)
    return CODES.get(code) if isinstance(code, int) else find_in(str(error))


def find_in(text: str) -> GpuFault | None:
    """Return the fault that a message names; None if it names none."""
    return next((fault for pattern, fault in TEXTS.items() if pattern.search(text)), None)


def bind_cpus_near(gpu: object, least: int, sysfs: Path = SYSFS) -> frozenset[int] | None:
    """Bind all threads of this process, and threads that they start, to the CPUs next to a GPU.

    ``gpu`` is torch's object with the GPU's properties. Return the CPUs. Return None and change
    nothing if the CPUs are unknown, if this process may use fewer than ``least`` of them, or if it
    may use only these CPUs.
    """
    allowed = os.sched_getaffinity(0)
    near = frozenset(allowed & _local_cpus(gpu, sysfs))
    if len(near) < least or near == allowed:
        return None
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # The thread has already ended.
            os.sched_setaffinity(int(thread), near)
    return near


def _local_cpus(gpu: object, sysfs: Path) -> set[int]:
    """Return the CPUs next to a GPU; an empty set if the kernel does not list them."""
    try:
        domain, bus, device = (getattr(gpu, f"pci_{part}_id") for part in ADDRESS)
        address = f"{domain:04x}:{bus:02x}:{device:02x}.0"
        text = (sysfs / "bus/pci/devices" / address / "local_cpulist").read_text()
        return set(_cpus(text))
    except (AttributeError, OSError, ValueError):  # An older torch lacks PCI ids.
        return set()


def _cpus(text: str) -> Iterator[int]:
    """Yield the CPUs in a list of the kernel, such as ``0-3,8``."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
