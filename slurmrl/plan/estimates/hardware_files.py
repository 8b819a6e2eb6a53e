"""Hardware profiles: files with the numbers of a GPU or of a host's processors, by their source.

The package has one for each GPU that clusters name. ``slurmrl profile-cluster`` measures others,
which take precedence: ``cluster.hardware``, then ``hardware/NAME.yaml`` next to the site profiles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
from slurmrl.errors import ConfigError, Problem

FOLDER: Final = "hardware"
"""Folder of a user's own files, next to the site profiles."""
SHIPPED: Final = "plan/estimates/gpus"
FITTED_GPU: Final = "h100"
"""The GPU whose published runs the shares were fitted to."""
CPU: Final = "cpu"
"""Name of the profile of ranks without GPUs."""
SOURCES: Final[Mapping[str, str]] = {
    "vendor": "from the vendor's data sheet",
    "fitted": "fitted to published runs",
    "measured": "measured",
    "guessed": "guessed",
}
"""Sections of a file, and the origin of their numbers in words."""
_Share: TypeAlias = Annotated[float, Field(gt=0, le=1.5)]
"""A share of a rate; a processor's boost may exceed the rate."""


class Numbers(Section):
    """Numbers of one source."""

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
    """The content of a file."""

    hardware: Name
    like: Name = FITTED_GPU
    """Shipped profile with the numbers that this file lacks."""
    made: Word | None = None
    """Time, hosts and program of a measurement."""
    vendor: Numbers = Numbers()
    fitted: Numbers = Numbers()
    measured: Numbers = Numbers()
    guessed: Numbers = Numbers()

    def numbers(self) -> dict[str, tuple[float, str]]:
        """Return each number with its source."""
        return {
            name: (value, source)
            for source in SOURCES
            for name, value in getattr(self, source).model_dump(exclude_none=True).items()
        }


@cache
def shipped_names() -> list[str]:
    """Return the names of the profiles that the package has."""
    files = package.names(SHIPPED)
    return sorted(name.rpartition("/")[2].removesuffix(".yaml") for name in files)


@cache
def shipped(name: str) -> HardwareFile:
    """Return a profile of the package. Raises OSError without one."""
    path = Path(f"{SHIPPED}/{name}.yaml")
    source = Source(path)
    node = compose(package.read(str(path)).decode(), str(path))
    source.values = Builder(source, file=str(path)).mapping(node, ())  # type: ignore[arg-type]
    return checked(source)


def read_file(path: Path) -> HardwareFile:
    """Return the profile in a file. Raises ConfigError and UnreadableInputError."""
    try:
        found = path.stat()
    except OSError:  # `read` says why
        return checked(read(path))
    return _read(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=16)
def _read(path: Path, changed_ns: int, size: int) -> HardwareFile:
    """Read a file that has changed; a search asks for its numbers thousands of times."""
    return checked(read(path))


def checked(source: Source) -> HardwareFile:
    """Return a profile from its values. Raises ConfigError with all problems."""
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
    """Problems of numbers that stand in two sections."""
    first: dict[str, str] = {}
    problems = []
    for section in SOURCES:
        for name in getattr(found, section).model_dump(exclude_none=True):
            if name in first:
                message = f"is a number of section {first[name]}, too: keep one"
                problems.append(source.problem((section, name), message))
            first.setdefault(name, section)
    return problems


def own_folder() -> Path:
    """Return the folder of the user's own files."""
    return profiles.folder() / FOLDER


def own_file(name: str) -> Path | None:
    """Return the user's own profile of this name; None without one or with ``--profile none``."""
    path = own_folder() / f"{name}.yaml"
    return path if env.PROFILE.get() != profiles.NONE and path.is_file() else None


def name_of(cluster: Cluster) -> str | None:
    """Return the name of the profile of a configuration's ranks; None if it does not tell.

    ``nvidia_h100_80gb_hbm3`` and ``h100`` have the same name.
    """
    if cluster.gpus_per_worker == 0:
        return CPU
    known, words = shipped_names(), _words(cluster.slurm.gpu_type or "")
    named = next((word for word in words if word in known), None)
    return named or next((word for word in words if own_file(word)), None)


def new_name(text: str) -> str | None:
    """Return the name of a profile of a GPU; None without a word.

    It is one word of the GPU's name, as `name_of` looks for: the known one, or else the first with
    a digit.
    """
    words, known = _words(text), shipped_names()
    with_digit = (word for word in words if re.search(r"\d", word))
    return next((word for word in words if word in known), None) or next(
        with_digit, words[-1] if words else None
    )


@cache
def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z0-9]+", text.lower()))
