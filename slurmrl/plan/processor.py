"""Whether processors have instructions for the precision of the computation."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from slurmrl import env, log
from slurmrl.config.schema import Config
from slurmrl.plan.model import GroupPlan, Plan
from slurmrl.plan.placement import ROLLOUTS, model_of
from slurmrl.plan.precision import generating

CPUINFO: Final = Path("/proc/cpuinfo")
FLAGS: Final = ("flags", "Features")
"""Names of the line with a core's instructions: of x86, and of aarch64."""
INSTRUCTIONS: Final = ("avx512_bf16", "amx_bf16", "bf16")
"""Products of bfloat16 matrices: of x86, and of aarch64."""

ELSEWHERE: Final = "compute nodes may have another processor (slurmrl doctor CONFIG --job)"


def computes_bfloat16(cpuinfo: Path = CPUINFO) -> bool | None:
    """Return whether this host's processor has instructions for bfloat16; None if the system does
    not list its instructions."""
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
    """Return why models that compute in bfloat16 would be slow on this host. Return None if they
    would not, or if the system does not tell."""
    named = ", ".join(models)
    if not named or computes_bfloat16(cpuinfo) is not False:
        return None
    host = env.NODE_NAME.get() or socket.gethostname()
    return (
        f"{named} in bfloat16: the processor of {host} has no instructions for it (such as "
        f"{INSTRUCTIONS[0]}), so it computes up to fifteen times as fast in float32"
    )


def log_slow_bfloat16(config: Config, plan: Plan, group: GroupPlan) -> None:
    """Log why the models of a group are slow on this host, if they are."""
    if slow := slow_bfloat16(bfloat16_models(config, plan, [group])):
        log.get(__name__).warning("%s", slow)
