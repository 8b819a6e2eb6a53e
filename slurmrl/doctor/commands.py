"""Slurm's commands where the job runs: with them a run adds and cancels its own links."""

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
        advice = "runs work; why a job was ended is then found out from the login node only"
        found.append(warning("scontrol in jobs", str(error), advice))
    try:
        client.try_out(script)
        found.append(ok("sbatch in jobs", "works: a chain of links is topped up by itself"))
    except SchedulerError as error:
        advice = "a run cannot add links: take enough with cluster.slurm.links, or slurmrl resume"
        found.append(warning("sbatch in jobs", str(error), advice))
    return found
