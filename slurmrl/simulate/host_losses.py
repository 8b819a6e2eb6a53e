"""Lost hosts of the trainers' job: lost spares, and the time until a loss is found."""

from __future__ import annotations

import random
from dataclasses import dataclass

from slurmrl.simulate.trial_costs import Disturbances, seconds_to_event
from slurmrl.workers.agent.loss_detection import GRACE_S
from slurmrl.workers.supervisor.rounds import LOOK_S, LOST_GRACE_S
from slurmrl.workers.supervisor.watcher import ASK_S


@dataclass(frozen=True)
class HostLosses:
    """The rules for lost hosts (docs/slurm.md, section on spare hosts)."""

    hosts: int
    spares: int
    disturbances: Disturbances
    lease_ttl_s: float
    status_s: float
    """Seconds between two looks at the leases."""

    def of_spares(self, now: float, rng: random.Random) -> list[float]:
        """Return when each spare of a job that starts now is lost, unless it is used before."""
        rate = self.disturbances.failures
        return [now + seconds_to_event(rate, rng) for _ in range(self.spares)]

    def found_s(self, *, first: bool) -> float:
        """Return the seconds from the loss of a host to the end of its round or job.

        ``first``: the host has the batch process, so other hosts requeue the job. Slurm ends a job
        without spares as soon as it considers the host lost.
        """
        by_slurm_s = self.disturbances.slurmd_timeout_s
        if self.hosts == 1:
            return by_slurm_s + (ASK_S / 2 if self.spares else 0.0)
        seconds = self.lease_ttl_s + self.status_s / 2
        if first:
            seconds += min(max(by_slurm_s - seconds, 0.0), GRACE_S)
        else:
            seconds += LOOK_S / 2 + LOST_GRACE_S
        return seconds if self.spares else min(seconds, by_slurm_s)
