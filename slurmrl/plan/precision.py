"""The precision in which completions are generated, and whether it is that of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from slurmrl.config.allocation import parse
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.schema import Config
from slurmrl.errors import AllocationError
from slurmrl.plan.server_arguments import last_value

DTYPE: Final = ("--dtype",)
NAMES: Final = {"float": "float32", "half": "float16"}
"""Other names of types in arguments of servers."""
NARROW: Final = ("bfloat16", "float16")
NARROWED: Final = {"sglang": "float16", "vllm": "bfloat16"}
"""What ``--dtype auto`` makes of float32 weights."""
ROUNDING: Final = (
    ("--quantization", "-q"),
    ("--torchao-config",),
    ("--kv-cache-dtype",),
)
"""Flags with which a server computes otherwise than in its type, unless their value is one of
`EXACT`."""
EXACT: Final = ("", "auto", "none", "null")
SERVER_ARGS: Final = "rollout.server_args"


@dataclass(frozen=True)
class GeneratingPrecision:
    """The precision of the engine that generates."""

    dtype: str | None
    """Type of its weights and computations; None if only the server knows."""
    source: str | None = None
    """The setting that chooses it; None: that of ``actor.dtype``."""
    rounding: tuple[str, ...] = ()
    """Arguments with which it rounds weights or caches further."""

    @property
    def title(self) -> str:
        return " ".join((self.dtype or "precision of the server", *self.rounding))


def generating(config: Config) -> GeneratingPrecision:
    """Return the precision in which the actor's completions are generated."""
    rollout, own = config.rollout, GeneratingPrecision(config.actor.dtype)
    try:
        backend = parse(rollout.backend).backend if rollout.backend else ""
    except AllocationError:  # reported by the checks of layouts
        return own
    if not backend or not BACKENDS[backend].serves:
        return own
    if rollout.servers:
        return GeneratingPrecision(None, "rollout.servers")
    arguments = rollout.server_args
    rounding = tuple(
        f"{flags[0]} {value}"
        for flags in ROUNDING
        if (value := last_value(arguments, flags)) is not None and value.lower() not in EXACT
    )
    given = last_value(arguments, DTYPE)
    if given is None:
        return GeneratingPrecision(own.dtype, SERVER_ARGS if rounding else None, rounding)
    dtype = NAMES.get(given, given)
    if dtype == "auto":
        dtype = config.actor.dtype
        dtype = NARROWED[backend] if dtype == "float32" else dtype
    return GeneratingPrecision(dtype, f"{SERVER_ARGS} --dtype", rounding)


def unlike_training(config: Config) -> str:
    """Return how the precision of generation differs from that of training; empty if it does
    not."""
    found, own = generating(config), config.actor.dtype
    if found.dtype is None:
        return f"the precision of {found.source} may differ from actor.dtype"
    parts = []
    if found.dtype != own:
        parts.append(f"in {found.dtype} ({found.source}) instead of {own} (actor.dtype)")
    if found.rounding:
        parts.append(f"with {', '.join(found.rounding)} ({SERVER_ARGS})")
    return f"completions are generated {' and '.join(parts)}" if parts else ""


def rounds_to(config: Config) -> str | None:
    """Return the narrower type to which generation rounds the actor's float32 weights, or their sum
    with adapters; None if it rounds none, and if only the server knows."""
    dtype = generating(config).dtype
    return dtype if dtype in NARROW else None
