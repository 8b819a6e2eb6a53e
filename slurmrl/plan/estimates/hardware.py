"""Rates of GPUs and their links, and the shares of these rates that runs reach.

The numbers come from hardware profiles. The package has profiles of common GPUs. Profiles that
``slurmrl profile-cluster`` has measured take precedence: first ``cluster.hardware``, then
``hardware/NAME.yaml`` next to the site profiles. The shares in shipped profiles are fitted to half
of the published measurements in docs/benchmarks.md ("Predicted seconds") and compared with the
other half.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Final, TypeAlias

from pydantic import Field

from slurmrl import env, package
from slurmrl.config import profiles
from slurmrl.config.load import validate
from slurmrl.config.schema import Cluster, PositiveFloat, Section
from slurmrl.config.schema.base import Fraction, Name, PositiveFraction, Word
from slurmrl.config.source import Builder, Source, compose, read
from slurmrl.errors import ConfigError, Problem, UsageError

FOLDER: Final = "hardware"
"""Folder of the user's own profiles, next to the site profiles."""
SHIPPED: Final = "plan/estimates/gpus"
FITTED_GPU: Final = "h100"
"""Name of the GPU whose published runs were used to fit the shares."""
CPU: Final = "cpu"
"""Name of the profile of ranks without GPUs."""
SOURCES: Final[Mapping[str, str]] = {
    "vendor": "from the vendor's data sheet",
    "fitted": "fitted to published runs",
    "measured": "measured",
    "guessed": "guessed",
}
"""Mapping from a profile's section to a description of the origin of its numbers."""
_Share: TypeAlias = Annotated[float, Field(gt=0, le=1.5)]
"""A share of a peak rate. It may exceed 1, because processors boost their clocks."""


class Numbers(Section):
    """The numbers of a profile that have the same origin (`Efficiency` explains them)."""

    memory_gib: PositiveFloat | None = None
    flops_per_s: PositiveFloat | None = None
    float32_flops_per_s: PositiveFloat | None = None
    bytes_per_s: PositiveFloat | None = None
    link: PositiveFloat | None = None
    network: PositiveFloat | None = None
    products: _Share | None = None
    grouped: _Share | None = None
    half_side: PositiveFloat | None = None
    attention: _Share | None = None
    fused_attention: _Share | None = None
    traffic: PositiveFloat | None = None
    fused_traffic: PositiveFloat | None = None
    stream: _Share | None = None
    decoding: _Share | None = None
    links: PositiveFraction | None = None
    overlap: Fraction | None = None
    launches: PositiveFloat | None = None
    gathers: PositiveFloat | None = None
    host_link: PositiveFloat | None = None
    latency: PositiveFloat | None = None
    network_latency: PositiveFloat | None = None
    token: PositiveFloat | None = None
    row: PositiveFloat | None = None
    rest: Annotated[float, Field(ge=0, le=10)] | None = None
    file_create_s: PositiveFloat | None = None
    file_read_s: PositiveFloat | None = None
    file_bytes_per_s: PositiveFloat | None = None


class HardwareFile(Section):
    """The content of a hardware profile's file."""

    hardware: Name
    like: Name = FITTED_GPU
    """Name of the shipped profile with the numbers that this file lacks."""
    made: Word | None = None
    """Time, hosts and program of a measurement."""
    vendor: Numbers = Numbers()
    fitted: Numbers = Numbers()
    measured: Numbers = Numbers()
    guessed: Numbers = Numbers()

    def numbers(self) -> dict[str, tuple[float, str]]:
        """Return a mapping from the name of each number to the number and its origin."""
        return {
            name: (value, source)
            for source in SOURCES
            for name, value in getattr(self, source).model_dump(exclude_none=True).items()
        }


@cache
def shipped_names() -> list[str]:
    """Return the sorted names of the shipped profiles."""
    files = package.names(SHIPPED)
    return sorted(name.rpartition("/")[2].removesuffix(".yaml") for name in files)


@cache
def shipped_file(name: str) -> HardwareFile:
    """Return a shipped profile. Raises OSError for an unknown name."""
    path = Path(f"{SHIPPED}/{name}.yaml")
    source = Source(path)
    node = compose(package.read(str(path)).decode(), str(path))
    source.values = Builder(source, file=str(path)).mapping(node, ())  # type: ignore[arg-type]
    return checked(source)


def read_file(path: Path) -> HardwareFile:
    """Return the profile in a file. Raises ConfigError and UnreadableInputError."""
    try:
        found = path.stat()
    except OSError:  # `read` raises an error with the reason.
        return checked(read(path))
    return _read(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=16)
def _read(path: Path, changed_ns: int, size: int) -> HardwareFile:
    """Return the profile in a file from a cache, because a search needs it thousands of times."""
    return checked(read(path))


def checked(source: Source) -> HardwareFile:
    """Return the profile with the values of ``source``. Raises ConfigError with all problems."""
    found, problems = validate(HardwareFile, source)
    problems = [*source.problems, *problems]
    if not problems and found is not None:
        if found.like not in shipped_names():
            known = ", ".join(shipped_names())
            problems.append(source.problem(("like",), f"{found.like!r} is not one of {known}"))
        problems += _twice(found, source)
    if problems or found is None:
        raise ConfigError(tuple(problems))
    return found


def _twice(found: HardwareFile, source: Source) -> list[Problem]:
    """Return a problem for each number that is in two sections."""
    first: dict[str, str] = {}
    problems = []
    for section in SOURCES:
        for name in getattr(found, section).model_dump(exclude_none=True):
            if name in first:
                message = f"is also in section {first[name]}: remove one of the two"
                problems.append(source.problem((section, name), message))
            first.setdefault(name, section)
    return problems


def own_folder() -> Path:
    """Return the folder of the user's own profiles."""
    return profiles.folder() / FOLDER


def own_file(name: str) -> Path | None:
    """Return the path of the user's profile with a name; None if there is none.

    ``--profile none`` also disables these profiles.
    """
    path = own_folder() / f"{name}.yaml"
    return path if env.PROFILE.get() != profiles.NONE and path.is_file() else None


def name_of(cluster: Cluster) -> str | None:
    """Return the name of the profile of a configuration's ranks; None if the hardware is unknown.

    The GPU types ``nvidia_h100_80gb_hbm3`` and ``h100`` have the same profile.
    """
    if cluster.gpus_per_worker == 0:
        return CPU
    known, words = shipped_names(), _words(cluster.slurm.gpu_type or "")
    named = next((word for word in words if word in known), None)
    return named or next((word for word in words if own_file(word)), None)


def new_name(text: str) -> str | None:
    """Return the name of a new profile for a GPU; None if the GPU's name ``text`` has no word.

    The result is a known word of the GPU's name, or else its first word with a digit, because
    `name_of` searches the words of the name.
    """
    words, known = _words(text), shipped_names()
    with_digit = (word for word in words if re.search(r"\d", word))
    return next((word for word in words if word in known), None) or next(
        with_digit, words[-1] if words else None
    )


@cache
def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z0-9]+", text.lower()))


GIB: Final = 2**30
FITTED_ERROR: Final = (
    "median 11 % of training steps and 20 % of RL steps of published H100 runs "
    "(slurmrl docs benchmarks)"
)
UNKNOWN_ERROR: Final = f"not known for this hardware; with the H100's profile {FITTED_ERROR}"


@dataclass(frozen=True)
class Gpu:
    """The rates of a GPU, or of the processor cores of a rank without GPU."""

    memory_bytes: int | None
    """Bytes of the GPU's memory; None if GPUs of this name differ in size."""
    flops_per_s: float
    """Dense bfloat16 operations per second."""
    float32_flops_per_s: float
    bytes_per_s: float
    """Bandwidth of the memory."""
    link: float
    """Bytes per second that a GPU sends to other GPUs of its host."""
    network: float
    """Bytes per second that a GPU sends to other hosts: its share of the network adapters."""
    asynchronous: bool = True
    """Whether the host only launches operations. False for ranks without a GPU."""


@dataclass(frozen=True)
class Efficiency:
    """The shares of peak rates that operations reach, and fixed costs."""

    products: float
    """Share of the peak rate in products of large matrices."""
    grouped: float
    """Share of the peak rate in products of experts, including the sorting of their tokens."""
    half_side: float
    """Side length of a product that reaches half of ``products`` or ``grouped``."""
    attention: float
    traffic: float
    """Number of elements that a layer's elementwise operations move per hidden unit and token."""
    stream: float
    """Share of the memory bandwidth in elementwise operations."""
    decoding: float
    """Share of the memory bandwidth in decoding, one token of each sequence at a time."""
    links: float
    """Share of the rates of links and adapters."""
    overlap: float
    """Share of the transfers of sharded weights that overlaps with products."""
    launches: float
    """Seconds to launch all kernels of a layer's forward pass."""
    host_link: float
    """Bytes per second between a GPU and the memory of its host."""
    latency: float
    """Seconds of an all-reduce of no data over the GPUs of a host."""
    network_latency: float
    """Seconds of latency of a collective between hosts."""
    token: float
    """Seconds for which the built-in engine's GPU waits for the host, per decoding step."""
    row: float
    """Seconds for which the GPU waits for the host, per sequence and decoding step."""
    rest: float
    """Seconds of a step outside its calls, relative to the seconds of its calls."""
    gathers: float = 0.0
    """Seconds of the host to gather or reduce a layer's sharded weights; 0 if not measured."""

    def of_product(self, *sides: float) -> float:
        """Return the share of the peak rate for products of matrices with these sides."""
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
    """Efficiency of megatron-core with TransformerEngine, SGLang and vLLM, which fuse elementwise
    operations and have a newer attention kernel."""
    numbers: Mapping[str, tuple[float, str]]
    """Mapping from the name of each number to the number and its origin (`SOURCES`)."""
    origin: str
    """Description of the profile's origin: its file, and time and hosts of a measurement."""

    error: str
    """Description of the known error of predictions."""

    @property
    def source(self) -> str:
        """Origin of the profile and of its numbers, on one line."""
        counts = Counter(source for _, source in self.numbers.values())
        parts = [
            f"{counts[name]} numbers {words}" for name, words in SOURCES.items() if counts[name]
        ]
        return f"hardware profile {self.name} ({self.origin}): {', '.join(parts)}"


def hardware_of(cluster: Cluster) -> Hardware | None:
    """Return the hardware of a configuration's ranks; None for unknown hardware.

    Raises UnreadableInputError. Raises UsageError for an invalid or unsuitable profile.
    """
    name = name_of(cluster)
    if cluster.hardware is not None:
        path = Path(cluster.hardware)
        found = read_file(path)
        if name is not None and CPU in (name, found.hardware) and name != found.hardware:
            ranks = "no GPUs" if name == CPU else f"GPUs ({name})"
            raise UsageError(f"{path} is a profile of {found.hardware}, but the ranks have {ranks}")
        if name != found.hardware and {name, found.hardware} <= {*shipped_names()}:
            raise UsageError(
                f"{path} is a profile of {found.hardware}, but cluster.slurm.gpu_type is {name}"
            )
        return made(found, str(path))
    if name is None:
        return None
    if (own := own_file(name)) is not None:
        found = read_file(own)
        if found.hardware != name:
            raise UsageError(f"{own} is a profile of {found.hardware}: rename the file")
        return made(found, str(own))
    return None if name == CPU else shipped(name)


def shipped_gpu(cluster: Cluster) -> Gpu | None:
    """Return the GPU of the shipped profile for ``slurm.gpu_type``; None if there is none."""
    name = name_of(cluster)
    return shipped(name).gpu if name in shipped_names() else None


@cache
def shipped(name: str) -> Hardware:
    """Return the hardware of a shipped profile."""
    return made(shipped_file(name), "shipped with slurmrl")


@lru_cache(maxsize=32)
def made(file: HardwareFile, origin: str) -> Hardware:
    """Return the hardware of a profile; ``origin`` describes its file."""
    numbers = _numbers(file)
    values = {name: value for name, (value, _) in numbers.items()}
    memory = values.get("memory_gib")
    rates = {one.name: values[one.name] for one in fields(Gpu) if one.name in values}
    plain = {one.name: values[one.name] for one in fields(Efficiency) if one.name in values}
    fused = {name: values.get(f"fused_{name}", value) for name, value in plain.items()}
    return Hardware(
        file.hardware,
        Gpu(
            None if memory is None else round(memory * GIB),
            **rates,
            asynchronous=file.hardware != CPU,
        ),
        Efficiency(**plain),
        Efficiency(**fused),
        numbers,
        f"{origin}, {file.made}" if file.made else origin,
        FITTED_ERROR if file == shipped_file(FITTED_GPU) else UNKNOWN_ERROR,
    )


def _numbers(file: HardwareFile) -> dict[str, tuple[float, str]]:
    """Return a profile's numbers with their origins. The profile ``like`` adds missing numbers."""
    like = shipped_file(file.like)
    numbers = {} if like == file else _numbers(like)
    if file.hardware != file.like:  # For other hardware, the numbers are guesses.
        numbers.pop("memory_gib", None)
        numbers = {name: (value, "guessed") for name, (value, _) in numbers.items()}
    return numbers | file.numbers()


@dataclass(frozen=True)
class Machine:
    """A cluster whose hosts have the same number of GPUs."""

    gpu: Gpu
    gpus_per_host: int
    efficiency: Efficiency

    def flops(self, share: float, width: int) -> float:
        """Return the operations per second at a share of the peak for elements of this width."""
        gpu = self.gpu
        return share * (gpu.flops_per_s if width == HALF else gpu.float32_flops_per_s)

    @property
    def streamed(self) -> float:
        """Bytes per second that elementwise operations move."""
        return self.gpu.bytes_per_s * self.efficiency.stream

    def ring(self, size: int, stride: int) -> float:
        """Return the bytes per second that each rank of a group sends in a ring.

        The ``size`` ranks are ``stride`` GPUs apart. A ring over several hosts uses the adapters of
        all its ranks on a host.
        """
        inside = self._inside(size, stride)
        network = inside * self.gpu.network if inside < size else self.gpu.link
        return min(self.gpu.link, network) * self.efficiency.links

    def exchange(self, size: int, stride: int) -> float:
        """Return the bytes per second that each rank of a group sends to all other ranks."""
        outside = 1 - self._inside(size, stride) / size
        network = self.gpu.network / outside if outside else self.gpu.link
        return min(self.gpu.link, network) * self.efficiency.links

    def latency(self, size: int, stride: int) -> float:
        """Return the latency of a group's collective in seconds."""
        remote = self._inside(size, stride) < size
        return self.efficiency.network_latency if remote else self.efficiency.latency

    def _inside(self, size: int, stride: int) -> int:
        """Return the number of a group's ranks on one host."""
        return max(1, min(size, self.gpus_per_host // stride))


HALF: Final = 2
"""Bytes of a bfloat16 number."""
