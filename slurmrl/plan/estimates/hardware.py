"""Memory and peak rates of GPUs by the names that clusters use. A new GPU is one line.

The numbers are those of the vendors' data sheets: memory size, dense bfloat16 operations (without
sparsity) and memory bandwidth.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from slurmrl.config.schema import Cluster

GIB: Final = 2**30
PROCESS: Final = 640 * 2**20
"""Resident memory of a worker without GPUs, in addition to its tensors: Python, torch, the
tokenizer, and memory that the allocator does not return."""
_UNITS: Final = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Gpu:
    memory_bytes: int | None
    """None if the name stands for cards with different sizes."""
    flops_per_s: float
    bytes_per_s: float


KNOWN: Final = {
    "v100": Gpu(None, 125e12, 0.9e12),
    "a100": Gpu(None, 312e12, 1.555e12),
    "a10": Gpu(24 * GIB, 125e12, 0.6e12),
    "a40": Gpu(48 * GIB, 150e12, 0.696e12),
    "l40s": Gpu(48 * GIB, 362e12, 0.864e12),
    "h100": Gpu(80 * GIB, 989e12, 3.35e12),
    "h200": Gpu(141 * GIB, 989e12, 4.8e12),
    "b200": Gpu(180 * GIB, 2250e12, 8.0e12),
}


def gpu_of(cluster: Cluster) -> Gpu | None:
    """The GPU that ``slurm.gpu_type`` names (``nvidia_h100_80gb_hbm3`` as well as ``h100``)."""
    words = re.split(r"[^a-z0-9]+", (cluster.slurm.gpu_type or "").lower())
    return next((KNOWN[word] for word in words if word in KNOWN), None)


def memory_bytes(cluster: Cluster) -> int | None:
    """Memory of one GPU from ``gpu_memory`` or the type's name; None if neither gives it."""
    if cluster.gpu_memory is not None:
        return memory_of(cluster.gpu_memory)
    size = re.search(r"(\d+)gb?(?![a-z])", (cluster.slurm.gpu_type or "").lower())
    gpu = gpu_of(cluster)
    if gpu is None:
        return None
    return int(size[1]) * GIB if size else gpu.memory_bytes


def margin(needed: int) -> int:
    """Return the bytes to leave free in addition to an estimate.

    About 3 GiB are for the CUDA context and NCCL's buffers, and 10 % for fragmentation.
    """
    return 3 * GIB + needed // 10


def memory_of(text: str) -> int:
    """Bytes of a memory size in Slurm's notation; a number without a unit is in mebibytes."""
    unit = text[-1] if text[-1] in _UNITS else "M"
    return int(text.rstrip("KMGT")) * _UNITS[unit]


def binary_size(number: int) -> str:
    """Bytes to three digits, in binary units."""
    for unit, factor in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number} B"
