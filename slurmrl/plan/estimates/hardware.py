"""GPUs known by the names that clusters use, their links, and the shares of peaks that runs reach.

Peak rates are numbers of the vendors' data sheets. The shares are fitted to half of the published
measurements in docs/benchmarks.md ("Predicted seconds") and compared with the other half. A new GPU
is one line of `KNOWN`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from slurmrl.config.schema import Cluster

GIB: Final = 2**30


@dataclass(frozen=True)
class Gpu:
    memory_bytes: int | None
    """None if GPUs of this name differ in size."""
    flops_per_s: float
    """Dense bfloat16 operations."""
    bytes_per_s: float
    """Bandwidth of its memory."""
    link: float = 32e9
    """Bytes per second that it sends to other GPUs of its host."""
    network: float = 25e9
    """Bytes per second that it sends to other hosts: its share of the host's adapters."""


KNOWN: Final[Mapping[str, Gpu]] = {
    "v100": Gpu(None, 125e12, 0.9e12, link=150e9, network=12.5e9),
    "a100": Gpu(None, 312e12, 1.555e12, link=300e9),
    "a10": Gpu(24 * GIB, 125e12, 0.6e12),
    "a40": Gpu(48 * GIB, 150e12, 0.696e12),
    "l40s": Gpu(48 * GIB, 362e12, 0.864e12),
    "h100": Gpu(80 * GIB, 989e12, 3.35e12, link=450e9, network=50e9),
    "h200": Gpu(141 * GIB, 989e12, 4.8e12, link=450e9, network=50e9),
    "gh200": Gpu(96 * GIB, 989e12, 4.0e12, link=450e9),
    "b200": Gpu(180 * GIB, 2250e12, 8.0e12, link=900e9, network=50e9),
}


def gpu_of(cluster: Cluster) -> Gpu | None:
    """The GPU that ``slurm.gpu_type`` names (``nvidia_h100_80gb_hbm3`` as well as ``h100``)."""
    words = re.split(r"[^a-z0-9]+", (cluster.slurm.gpu_type or "").lower())
    return next((KNOWN[word] for word in words if word in KNOWN), None)


@dataclass(frozen=True)
class Efficiency:
    """Shares of peak rates, and fixed costs."""

    products: float = 0.75
    """Share of the peak in products of large matrices."""
    grouped: float = 0.25
    """The same in products of experts, whose tokens are sorted first."""
    half_side: float = 1000
    """Smallest side of a product that reaches half of these shares."""
    attention: float = 0.22
    traffic: float = 56
    """Elements that elementwise operations of a layer move for each hidden unit of a token."""
    stream: float = 0.65
    """Share of the memory's bandwidth in elementwise operations."""
    decoding: float = 0.4
    """The same in an engine that samples one token of each sequence at a time."""
    links: float = 0.85
    """Share of the rates of links and adapters."""
    overlap: float = 0.9
    """Share of the traffic of sharded weights that products hide."""
    launches: float = 150e-6
    """Seconds to start all kernels of a layer's forward pass."""
    host_link: float = 20e9
    """Bytes per second between a GPU and the memory of its host."""
    rest: float = 0.2
    """Seconds of a step outside its calls, as a share of the seconds of its calls."""

    def of_product(self, *sides: float) -> float:
        """Return the share of the peak of products with these sides."""
        side = min(sides)
        return self.products * side / (side + self.half_side)


FUSED: Final = replace(Efficiency(), attention=0.44, traffic=28)
"""The efficiency of engines that fuse elementwise operations and run a newer attention kernel:
megatron-core with TransformerEngine, SGLang and vLLM."""


@dataclass(frozen=True)
class Machine:
    """GPUs in hosts of equal size."""

    gpu: Gpu
    gpus_per_host: int
    efficiency: Efficiency = field(default_factory=Efficiency)

    def flops(self, share: float, width: int) -> float:
        """Operations per second at a share of the peak, of elements with ``width`` bytes."""
        return self.gpu.flops_per_s * share * (1 if width == HALF else FLOAT32_SHARE)

    @property
    def streamed(self) -> float:
        """Bytes per second of elementwise operations."""
        return self.gpu.bytes_per_s * self.efficiency.stream

    def ring(self, size: int, stride: int) -> float:
        """Return the bytes per second that each rank of a group sends in a ring.

        The ``size`` ranks are ``stride`` GPUs apart. A ring that leaves the host uses the adapters
        of all its members there.
        """
        inside = self._inside(size, stride)
        network = inside * self.gpu.network if inside < size else self.gpu.link
        return min(self.gpu.link, network) * self.efficiency.links

    def exchange(self, size: int, stride: int) -> float:
        """Return the bytes per second that each rank of a group sends to all others."""
        outside = 1 - self._inside(size, stride) / size
        network = self.gpu.network / outside if outside else self.gpu.link
        return min(self.gpu.link, network) * self.efficiency.links

    def _inside(self, size: int, stride: int) -> int:
        """Members of a group on one host."""
        return max(1, min(size, self.gpus_per_host // stride))


HALF: Final = 2
"""Bytes of a bfloat16 number."""
FLOAT32_SHARE: Final = 1 / 15
"""Float32 operations per bfloat16 operation (H100: 67 and 989 TFLOP/s; A100: 19.5 and 312)."""
