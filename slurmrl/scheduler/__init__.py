"""Schedulers, which start the links of a trial.

To add a scheduler, add a file to this package and a line to ``SCHEDULERS``.
"""

from __future__ import annotations

from slurmrl import env
from slurmrl.errors import SchedulerError
from slurmrl.registry import Registry
from slurmrl.scheduler.base import Scheduler

SCHEDULERS = Registry(
    "scheduler",
    {
        "local": "slurmrl.scheduler.local_chain:LocalScheduler",
        "slurm": "slurmrl.scheduler.slurm:SlurmScheduler",
    },
)
AUTO = "auto"
PROBE_S = 10.0
"""Seconds that ``auto`` waits for a controller."""
_UNCONFIGURED = "Could not establish a configuration source"
"""Message of Slurm's commands that find no configuration: the machine belongs to no cluster."""
_UNREACHED = "failed to fetch remote configs"
"""Words in that message if the machine belongs to a cluster but cannot reach the controller."""


def make(name: str) -> Scheduler:
    """Return the scheduler with a name that `choose` returned. Raises UnknownNameError."""
    scheduler: Scheduler = SCHEDULERS.load(name)()
    return scheduler


def choose(name: str, *, asks_slurm: bool) -> str:
    """Resolve ``auto`` to ``slurm`` or ``local``.

    The result is ``slurm`` if the configuration requires Slurm (``asks_slurm``) or if this machine
    belongs to a cluster. If the controller does not answer, `Scheduler.check` rejects the
    submission, so that no trial runs on a login node.
    """
    if name != AUTO:
        SCHEDULERS.reference(name)
        return name
    if asks_slurm:
        return "slurm"
    import shutil  # Slow import: every command imports this module.

    if shutil.which("sbatch") is None:
        return "local"
    from slurmrl.scheduler.client import SlurmClient

    try:
        SlurmClient(timeout_s=PROBE_S).ping()
    except SchedulerError as error:
        unconfigured = _UNCONFIGURED in str(error) and _UNREACHED not in str(error)
        if unconfigured and not env.SLURM_CONF.get():
            return "local"
    return "slurm"
