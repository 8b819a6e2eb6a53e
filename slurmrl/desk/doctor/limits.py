"""Limits of a process: open files, and processes of the user."""

from __future__ import annotations

import resource
from collections.abc import Callable

from slurmrl.desk.doctor.check import Check, ok, warning

FEW_FILES = 4096
"""A worker with NCCL holds some hundred descriptors, a launcher of many hosts a few for each."""
FEW_PROCESSES = 2048
"""Threads count: one worker has about a hundred."""

Limit = Callable[[int], tuple[int, int]]


def check(getrlimit: Limit = resource.getrlimit) -> list[Check]:
    return [
        _limit(
            "open files",
            getrlimit(resource.RLIMIT_NOFILE),
            FEW_FILES,
            "put 'ulimit -n 65536' into cluster.slurm.setup, or ask for a higher limit "
            "(LimitNOFILE of slurmd, PropagateResourceLimits)",
        ),
        _limit(
            "processes",
            getrlimit(resource.RLIMIT_NPROC),
            FEW_PROCESSES,
            "put 'ulimit -u 65536' into cluster.slurm.setup, or ask for a higher limit "
            "(LimitNPROC of slurmd, PropagateResourceLimits)",
        ),
    ]


def _limit(name: str, limits: tuple[int, int], few: int, advice: str) -> Check:
    soft, hard = limits
    measured = f"limit {_number(soft)} (hard {_number(hard)})"
    if soft != resource.RLIM_INFINITY and soft < few:
        return warning(name, f"{measured}, below {few}", advice, limit=float(soft))
    return ok(name, measured, limit=float(soft))


def _number(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
