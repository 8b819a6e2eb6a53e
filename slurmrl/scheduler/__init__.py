"""Schedulers, which start the links of a trial.

A new one is a file in this package and a line in ``SCHEDULERS``.
"""

from __future__ import annotations

from slurmrl.errors import SchedulerError
from slurmrl.registry import Registry
from slurmrl.scheduler.base import Scheduler

SCHEDULERS = Registry(
    "scheduler",
    {
        "local": "slurmrl.scheduler.local:LocalScheduler",
        "slurm": "slurmrl.scheduler.slurm:SlurmScheduler",
    },
)
AUTO = "auto"
PROBE_S = 10.0
"""How long a controller may take to answer before ``auto`` chooses the local scheduler."""


def make(name: str) -> Scheduler:
    """Return the scheduler of a name (not ``auto``: see ``choose``). Raises UnknownNameError."""
    scheduler: Scheduler = SCHEDULERS.load(name)()
    return scheduler


def choose(name: str, *, asks_slurm: bool) -> str:
    """Resolve ``auto``: ``slurm`` if the configuration asks for it or if sbatch is on PATH and a
    controller answers, else ``local``.

    A configuration with Slurm's settings must not run on a login node while its controller is
    down: `Scheduler.check` rejects its submission.
    """
    if name != AUTO:
        SCHEDULERS.reference(name)
        return name
    if asks_slurm:
        return "slurm"
    import shutil  # slow to import, and every command imports this module

    if shutil.which("sbatch") is None:
        return "local"
    from slurmrl.scheduler.client import SlurmClient

    try:
        SlurmClient(timeout_s=PROBE_S).ping()
    except SchedulerError:
        return "local"
    return "slurm"
