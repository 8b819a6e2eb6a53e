"""The allocation of this job: its hosts, which of them are usable, and its time limit."""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import dataclass

from slurmrl import env, log
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.name_resolve.base import NameStore
from slurmrl.name_resolve.file import FileNameStore
from slurmrl.plan.model import Plan
from slurmrl.run.hosts import BadHost, blamed, failed_starts
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import parse
from slurmrl.scheduler.client import SlurmClient, usable_hosts
from slurmrl.watch import published

logger = log.get(__name__)


@dataclass(frozen=True)
class JobHosts:
    """Hosts in Slurm's order; none without Slurm."""

    paths: RunPaths
    needed: int
    """Hosts that the group runs on; the others are spares."""
    hosts: tuple[str, ...] = ()
    end: float | None = None
    """When the job reaches its time limit, by this host's clock."""
    job: str = ""
    """Job id and restart count."""

    @staticmethod
    def of_this_job(options: Namespace, paths: RunPaths) -> JobHosts:
        needed = Plan.read(paths.plan).group(options.group).hosts_of_job
        if options.launcher == "direct":
            return JobHosts(paths, needed)
        given = parse.hosts(env.NODE_LIST.get())
        job = f"{env.JOB_ID.get()}.{env.RESTART_COUNT.get()}"
        return JobHosts(paths, needed, given, _end_of_job(), job)

    def choose(self) -> tuple[str, ...] | None:
        """Return the hosts of the next round, the first usable ones; None if too few are left.
        Spares replace hosts because of which an incarnation failed, such as one without a mount.
        With too few spares, those that failed longest ago are used again."""
        failed = {start.host for start in self.failed_starts()}
        good = usable_hosts(self.hosts, self.lost() | failed)
        if len(good) < self.needed:
            return None
        failures = self._blamed()
        best = sorted(good, key=lambda host: failures.get(host, 0))[: self.needed]
        return tuple(host for host in good if host in best)

    def failed_starts(self) -> list[BadHost]:
        """Return the failed starts in this start of the job, as recorded by its hosts."""
        try:
            return failed_starts(self.paths, self.job)
        except (CorruptFileError, EnvironmentFailure) as error:
            logger.warning("cannot look for failed starts, will retry: %s", error)
            return []

    def _blamed(self) -> dict[str, int]:
        try:
            return blamed(self.paths)
        except EnvironmentFailure as error:
            logger.warning("cannot look for hosts that failed, will retry: %s", error)
            return {}

    def lost(self) -> set[str]:
        """Return the hosts whose agents died in this start of the job."""
        try:
            with FileNameStore(self.paths.names) as names:
                return {host for host in self.hosts if self._is_lost(names, host)}
        except (EnvironmentFailure, CorruptFileError) as error:
            logger.warning("cannot look for lost hosts, will retry: %s", error)
            return set()

    def _is_lost(self, names: NameStore, host: str) -> bool:
        lost = published.lost(names, host)
        return lost is not None and lost.job.startswith(f"{self.job}.")


def _end_of_job() -> float | None:
    known = env.SLURM_END_TIME.get()
    if known is not None:
        return known
    try:
        left_s = SlurmClient().time_left_s(env.JOB_ID.get())
    except EnvironmentFailure as error:
        logger.info("cannot ask Slurm when this job ends: %s", error)
        return None
    return time.time() + left_s if left_s is not None else None
