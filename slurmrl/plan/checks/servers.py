"""Checks of the servers that generate in the trainers' job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from slurmrl.allocation.allocation import BACKENDS
from slurmrl.errors import Problem
from slurmrl.plan.checks.draft import Draft
from slurmrl.plan.engines import ENGINES
from slurmrl.plan.placement import ROLLOUTS

OF_SERVERS: Final = ("python", "server_args", "server_start_s", "server_silence_s")
"""Settings of ``rollout`` that only servers use."""


def servers(draft: Draft) -> Iterator[Problem]:
    """Servers have GPUs and a Python, and only they have settings of servers."""
    rollout = draft.config.rollout
    allocation = draft.allocations().get(ROLLOUTS)
    backend = allocation.backend if allocation else ""
    if not backend or not BACKENDS[backend].serves:
        able = " or ".join(name for name in ENGINES if BACKENDS[name].serves)
        for field in OF_SERVERS:
            default = type(rollout).model_fields[field].get_default(call_default_factory=True)
            if getattr(rollout, field) != default:  # (a resumed trial states its defaults)
                message = f"is not allowed: it is for servers (rollout.backend {able})"
                yield draft.problem((ROLLOUTS, field), message)
        return
    if backend not in ENGINES:
        return  # already reported
    if not rollout.gpus.strip():
        message = (
            f"is required with {backend}: the GPUs of the trainers' job (workers, if there are no "
            "GPUs) that have a server; servers in jobs of their own do not run in this version"
        )
        yield draft.problem((ROLLOUTS, "gpus"), message)
    if reason := _unusable(rollout.python, contained=bool(draft.config.cluster.slurm.container)):
        message = f"{reason}; set the Python of an environment in which {backend} is installed"
        yield draft.problem((ROLLOUTS, "python"), message)
    if rollout.greedy and rollout.temperature != 1.0:
        message = (
            f"{rollout.temperature:g} is not allowed with greedy and {backend}: its "
            "log-probabilities of greedy tokens are those at temperature 1"
        )
        yield draft.problem((ROLLOUTS, "temperature"), message)


def _unusable(python: str | None, *, contained: bool) -> str:
    """Why an interpreter cannot be used. One inside a container cannot be seen from here."""
    if python is None:
        return "is required"
    if not Path(python).is_absolute():
        return f"'{python}' is not allowed: not an absolute path"
    if not contained and not os.access(python, os.X_OK):
        return f"'{python}' is not allowed: there is no such program"
    return ""
