"""Rates of GPUs and their links, and the shares of these rates that runs reach.

The numbers come from hardware profiles (`hardware_files`). The shares of the shipped ones are
fitted to half of the published measurements in docs/benchmarks.md ("Predicted seconds") and
compared with the other half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

from slurmrl.config.schema import Cluster
from slurmrl.errors import UsageError
from slurmrl.plan.estimates import hardware_files
from slurmrl.plan.estimates.hardware_files import CPU, FITTED_GPU, SOURCES, HardwareFile

GIB: Final = 2**30
FITTED_ERROR: Final = (
    "median 11 % of training steps and 20 % of RL steps of published H100 runs "
    "(slurmrl docs benchmarks)"
)
UNKNOWN_ERROR: Final = f"not known for this hardware; with the H100's profile {FITTED_ERROR}"


@dataclass(frozen=True)
class Gpu:
    """Rates of a GPU, or of the processor cores of a rank without one."""

    memory_bytes: int | None
    """None if GPUs of this name differ in size."""
    flops_per_s: float
    """Dense bfloat16 operations."""
    float32_flops_per_s: float
    bytes_per_s: float
    """Bandwidth of its memory."""
    link: float
    """Bytes per second that it sends to other GPUs of its host."""
    network: float
    """Bytes per second that it sends to other hosts: its share of the host's adapters."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of peak rates, and fixed costs."""

    products: float
    """Share of the peak in products of large matrices."""
    grouped: float
    """The same in products of experts, whose tokens are sorted first."""
    half_side: float
    """Smallest side of a product that reaches half of these shares."""
    attention: float
    traffic: float
    """Elements that elementwise operations of a layer move for each hidden unit of a token."""
    stream: float
    """Share of the memory's bandwidth in elementwise operations."""
    decoding: float
    """The same in an engine that samples one token of each sequence at a time."""
    links: float
    """Share of the rates of links and adapters."""
    overlap: float
    """Share of the traffic of sharded weights that products hide."""
    launches: float
    """Seconds to start all kernels of a layer's forward pass."""
    host_link: float
    """Bytes per second between a GPU and the memory of its host."""
    latency: float
    """Seconds of a sum over the GPUs of a host, without its data."""
    network_latency: float
    """The same between hosts."""
    token: float
    """Seconds for which the GPU waits for the host, per token of a batch in the built-in engine."""
    row: float
    """The same for each sequence of the batch."""
    rest: float
    """Seconds of a step outside its calls, as a share of the seconds of its calls."""

    def of_product(self, *sides: float) -> float:
        """Return the share of the peak of products with these sides."""
        side = min(sides)
        return self.products * side / (side + self.half_side)


@dataclass(frozen=True)
class Hardware:
    """The numbers of a hardware profile."""

    name: str
    gpu: Gpu
    efficiency: Efficiency
    """Efficiency of torch's own operations."""
    fused: Efficiency
    """Efficiency of engines that fuse elementwise operations and run a newer attention kernel:
    megatron-core with TransformerEngine, SGLang and vLLM."""
    numbers: Mapping[str, tuple[float, str]]
    """All numbers with their sources (`hardware_files.SOURCES`)."""
    origin: str
    """The file, or the words for a shipped one; for a measured one, also time and hosts."""

    error: str
    """Known error of predictions, in words."""

    @property
    def source(self) -> str:
        """The origin of the numbers, in one line."""
        counts = Counter(source for _, source in self.numbers.values())
        parts = [
            f"{counts[name]} numbers {words}" for name, words in SOURCES.items() if counts[name]
        ]
        return f"hardware profile {self.name} ({self.origin}): {', '.join(parts)}"


def hardware_of(cluster: Cluster) -> Hardware | None:
    """Return the hardware of a configuration's ranks; None if it is unknown.

    Raises UsageError for an invalid file or a file of other hardware, UnreadableInputError.
    """
    name = hardware_files.name_of(cluster)
    if cluster.hardware is not None:
        path = Path(cluster.hardware)
        found = hardware_files.read_file(path)
        if name is not None and CPU in (name, found.hardware) and name != found.hardware:
            ranks = "no GPUs" if name == CPU else f"GPUs ({name})"
            raise UsageError(f"{path} is a profile of {found.hardware}, but the ranks have {ranks}")
        if name != found.hardware and {name, found.hardware} <= {*hardware_files.shipped_names()}:
            raise UsageError(
                f"{path} is a profile of {found.hardware}, but cluster.slurm.gpu_type is a {name}"
            )
        return made(found, str(path))
    if name is None:
        return None
    if (own := hardware_files.own_file(name)) is not None:
        found = hardware_files.read_file(own)
        if found.hardware != name:
            raise UsageError(f"{own} is a profile of {found.hardware}: rename the file")
        return made(found, str(own))
    return None if name == CPU else shipped(name)


def shipped_gpu(cluster: Cluster) -> Gpu | None:
    """Return the GPU that ``slurm.gpu_type`` names, without a user's own files."""
    name = hardware_files.name_of(cluster)
    return shipped(name).gpu if name in hardware_files.shipped_names() else None


@cache
def shipped(name: str) -> Hardware:
    """Return the hardware of a profile that the package has."""
    return made(hardware_files.shipped(name), "shipped with slurmrl")


@lru_cache(maxsize=32)
def made(file: HardwareFile, origin: str) -> Hardware:
    """Return the hardware of a profile; ``origin`` names its file."""
    numbers = _numbers(file)
    values = {name: value for name, (value, _) in numbers.items()}
    memory = values.get("memory_gib")
    rates = {one.name: values[one.name] for one in fields(Gpu) if one.name in values}
    plain = {one.name: values[one.name] for one in fields(Efficiency)}
    fused = {name: values.get(f"fused_{name}", value) for name, value in plain.items()}
    return Hardware(
        file.hardware,
        Gpu(None if memory is None else round(memory * GIB), **rates),
        Efficiency(**plain),
        Efficiency(**fused),
        numbers,
        f"{origin}, {file.made}" if file.made else origin,
        FITTED_ERROR if file == hardware_files.shipped(FITTED_GPU) else UNKNOWN_ERROR,
    )


def _numbers(file: HardwareFile) -> dict[str, tuple[float, str]]:
    """Return the numbers of a profile and of the profiles that it is like, with their sources."""
    like = hardware_files.shipped(file.like)
    numbers = {} if like == file else _numbers(like)
    if file.hardware != file.like:  # numbers of other hardware are guesses; its memory is unknown
        numbers.pop("memory_gib", None)
        numbers = {name: (value, "guessed") for name, (value, _) in numbers.items()}
    return numbers | file.numbers()


@dataclass(frozen=True)
class Machine:
    """GPUs in hosts of equal size."""

    gpu: Gpu
    gpus_per_host: int
    efficiency: Efficiency

    def flops(self, share: float, width: int) -> float:
        """Operations per second at a share of the peak, of elements with ``width`` bytes."""
        gpu = self.gpu
        return share * (gpu.flops_per_s if width == HALF else gpu.float32_flops_per_s)

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

    def latency(self, size: int, stride: int) -> float:
        """Return the seconds of a collective of a group, without its data."""
        remote = self._inside(size, stride) < size
        return self.efficiency.network_latency if remote else self.efficiency.latency

    def _inside(self, size: int, stride: int) -> int:
        """Members of a group on one host."""
        return max(1, min(size, self.gpus_per_host // stride))


HALF: Final = 2
"""Bytes of a bfloat16 number."""
