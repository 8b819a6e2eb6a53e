"""Slurm's commands inside a job, with which a run adds and cancels links."""

from __future__ import annotations

from pathlib import Path

from slurmrl.doctor.check import Check, ok, warning
from slurmrl.errors import SchedulerError
from slurmrl.scheduler.client import SlurmClient

TIMEOUT_S = 15.0


def check(script: Path) -> list[Check]:
    """``script`` is a batch script that sbatch has taken before; nothing is submitted."""
    client = SlurmClient(timeout_s=TIMEOUT_S)
    found = []
    try:
        client.ping()
        found.append(ok("scontrol in jobs", "works"))
    except SchedulerError as error:
        advice = "runs work, but only the login node can find out why a job ended"
        found.append(warning("scontrol in jobs", str(error), advice))
    try:
        client.try_out(script)
        found.append(ok("sbatch in jobs", "works: a run adds links to its chain itself"))
    except SchedulerError as error:
        advice = (
            "a run cannot add links: set cluster.slurm.links high enough, or use slurmrl resume"
        )
        found.append(warning("sbatch in jobs", str(error), advice))
    return found
