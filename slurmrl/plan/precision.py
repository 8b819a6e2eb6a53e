"""The precision of generation, its difference from training, and bfloat16 on CPUs."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from slurmrl import env, log
from slurmrl.config.allocation import parse
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.schema import Config
from slurmrl.errors import AllocationError
from slurmrl.plan.engine_rules import last_value
from slurmrl.plan.model import GroupPlan, Plan
from slurmrl.plan.placement import ROLLOUTS, model_of

DTYPE: Final = ("--dtype",)
NAMES: Final = {"float": "float32", "half": "float16", "bf16": "bfloat16"}
"""Mapping from an alias in a server's arguments to the data type."""
NARROW: Final = ("bfloat16", "float16")
NARROWED: Final = {"sglang": "float16", "vllm": "bfloat16"}
"""Mapping from a kind of server to its data type with ``--dtype auto`` for float32 weights."""
ROUNDING: Final = (
    ("--quantization", "-q", "--quantization-config"),
    *((f"--{name}",) for name in ("modelopt-quant", "rl-quant-profile", "torchao-config")),
    *((f"--{name}-dtype",) for name in ("kv-cache", "mamba-cache", "mamba-ssm-cache", "mamba-ssm")),
)
"""Flags that change the data type in which a server computes, unless their value is the server's
type or one of `EXACT`."""
EXACT: Final = ("", "auto", "none", "null", "float32")
SERVER_ARGS: Final = "rollout.server_args"


class Rounding(NamedTuple):
    """A narrower type of an engine's weights or caches, and the setting that chooses the type."""

    title: str
    setting: str


@dataclass(frozen=True)
class GeneratingPrecision:
    """The precision of the engine that generates."""

    dtype: str | None
    """Data type of weights and computations; None if only the server knows the type."""
    source: str | None = None
    """Setting that chooses the precision; None means ``actor.dtype``."""
    rounding: tuple[Rounding, ...] = ()
    """Narrower types to which the engine rounds weights or caches."""

    @property
    def title(self) -> str:
        rounded = (each.title for each in self.rounding)
        return " ".join((self.dtype or "precision of the server", *rounded))


def generating(config: Config) -> GeneratingPrecision:
    """Return the precision in which the actor generates completions."""
    rollout, own = config.rollout, GeneratingPrecision(config.actor.dtype)
    try:
        backend = parse(rollout.backend).backend if rollout.backend else ""
    except AllocationError:  # The check of allocation strings reports the error.
        return own
    if not backend or not BACKENDS[backend].serves:
        return own
    if rollout.servers:
        return GeneratingPrecision(None, "rollout.servers")
    arguments = rollout.server_args
    given = last_value(arguments, DTYPE)
    dtype = config.actor.dtype if given is None else NAMES.get(given, given)
    if dtype == "auto":
        dtype = NARROWED[backend] if config.actor.dtype == "float32" else config.actor.dtype
    chosen = {"quantization": rollout.quantization, "kv_cache_dtype": rollout.kv_cache_dtype}
    rounding = tuple(
        Rounding(f"{name} {value}", f"rollout.{name}") for name, value in chosen.items() if value
    ) + tuple(
        Rounding(f"{flags[0]} {value}", SERVER_ARGS)
        for flags in ROUNDING
        if (value := last_value(arguments, flags)) is not None
        and NAMES.get(value.lower(), value.lower()) not in (*EXACT, dtype)
    )
    if given is None:
        return GeneratingPrecision(dtype, rounding[0].setting if rounding else None, rounding)
    return GeneratingPrecision(dtype, f"{SERVER_ARGS} --dtype", rounding)


def unlike_training(config: Config) -> str:
    """Return how the precision of generation differs from training; empty if it does not."""
    found, own = generating(config), config.actor.dtype
    if found.dtype is None:
        return f"the precision of {found.source} may differ from actor.dtype"
    parts = []
    if found.dtype != own:
        parts.append(f"in {found.dtype} ({found.source}) instead of {own} (actor.dtype)")
    if config.actor.fp8 is not None:
        parts.append("without the FP8 of training (actor.fp8)")
    parts += [f"with {each.title} ({each.setting})" for each in found.rounding]
    return f"completions are generated {' and '.join(parts)}" if parts else ""


def rounds_to(config: Config, served: Collection[str] = ()) -> str | None:
    """Return the narrower type to which generation rounds the actor's float32 weights.

    With adapters, generation may round the sum of weights and adapters. ``served`` has the types of
    running servers. Return None if generation does not round, or if the type is unknown.
    """
    types = {generating(config).dtype, *served}
    return next((dtype for dtype in NARROW if dtype in types), None)


CPUINFO: Final = Path("/proc/cpuinfo")
FLAGS: Final = ("flags", "Features")
"""Names of the line that lists a core's instructions, for x86 and aarch64."""
INSTRUCTIONS: Final = ("avx512_bf16", "amx_bf16", "bf16")
"""Names of the instructions for products of bfloat16 matrices, for x86 and aarch64."""

ELSEWHERE: Final = "compute nodes may have another processor (slurmrl doctor CONFIG --job)"


def computes_bfloat16(cpuinfo: Path = CPUINFO) -> bool | None:
    """Return whether this host's processor has instructions for bfloat16.

    Return None if the system does not list the processor's instructions.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    listed = (line.partition(":") for line in lines)
    found = {flag for name, _, flags in listed if name.strip() in FLAGS for flag in flags.split()}
    return any(flag in found for flag in INSTRUCTIONS) if found else None


def bfloat16_models(config: Config, plan: Plan, groups: Iterable[GroupPlan]) -> list[str]:
    """Return the models of these groups that compute in bfloat16 on processors."""
    names = [
        name for group in groups if not group.gpus_per_worker for name in plan.models_of(group.name)
    ]
    return [name for name in names if _dtype(config, name) == "bfloat16"]


def _dtype(config: Config, name: str) -> str | None:
    return generating(config).dtype if name == ROLLOUTS else model_of(config, name).dtype


def slow_bfloat16(models: Iterable[str], cpuinfo: Path = CPUINFO) -> str | None:
    """Return why models that compute in bfloat16 would be slow on this host.

    Return None if the processor is fast, or if the system does not list its instructions.
    """
    named = ", ".join(models)
    if not named or computes_bfloat16(cpuinfo) is not False:
        return None
    host = env.NODE_NAME.get() or socket.gethostname()
    return (
        f"{named} in bfloat16: the processor of {host} has no bfloat16 instructions (such as "
        f"{INSTRUCTIONS[0]}); computation is up to fifteen times as fast in float32"
    )


def log_slow_bfloat16(config: Config, plan: Plan, group: GroupPlan) -> None:
    """Log a warning if models of a group compute slowly in bfloat16 on this host."""
    if slow := slow_bfloat16(bfloat16_models(config, plan, [group])):
        log.get(__name__).warning("%s", slow)
