"""Slurm's commands, on the login node and inside jobs."""

from __future__ import annotations

from pathlib import Path

from slurmrl.desk.doctor.check import Check, failed, ok, warning
from slurmrl.errors import SchedulerError
from slurmrl.scheduler.client import SlurmClient

TIMEOUT_S = 20.0


def version() -> Check:
    """Raises SchedulerError."""
    return ok("slurm version", SlurmClient(timeout_s=TIMEOUT_S).version())


def controller() -> Check:
    try:
        SlurmClient(timeout_s=TIMEOUT_S).ping()
    except SchedulerError as error:
        return failed("scontrol", str(error), "see whether Slurm's commands work in your shell")
    return ok("scontrol", "the controller answers")


def in_jobs(script: Path) -> list[Check]:
    """Check the commands with which a run adds and cancels links.

    ``script`` is a batch script that sbatch has taken before; nothing is submitted.
    """
    client = SlurmClient(timeout_s=TIMEOUT_S)
    checks = []
    try:
        client.ping()
        checks.append(ok("scontrol in jobs", "works"))
    except SchedulerError as error:
        advice = "runs work, but only the login node can find out why a job ended"
        checks.append(warning("scontrol in jobs", str(error), advice))
    try:
        client.try_out(script)
        checks.append(ok("sbatch in jobs", "works: a run adds links to its chain itself"))
    except SchedulerError as error:
        advice = (
            "a run cannot add links: set cluster.slurm.links high enough, or use slurmrl resume"
        )
        checks.append(warning("sbatch in jobs", str(error), advice))
    return checks
