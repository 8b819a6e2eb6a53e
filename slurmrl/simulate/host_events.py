"""The hosts of the trainers' job: losses, the time until their detection, and slow hosts."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from slurmrl.simulate.trial_costs import Disturbances, seconds_to_event
from slurmrl.workers.agent.loss_detection import GRACE_S
from slurmrl.workers.supervisor.rounds import LOOK_S, LOST_GRACE_S
from slurmrl.workers.supervisor.watcher import ASK_S


@dataclass(frozen=True)
class HostLosses:
    """Losses of hosts and their detection (docs/slurm.md, section on spare hosts)."""

    hosts: int
    spares: int
    disturbances: Disturbances
    lease_ttl_s: float
    status_s: float
    """Interval between two checks of the leases."""

    def of_spares(self, now: float, rng: random.Random) -> list[float]:
        """Return the times at which unused spares fail, for a job that starts now."""
        rate = self.disturbances.failures
        return [now + seconds_to_event(rate, rng) for _ in range(self.spares)]

    def found_s(self, *, first: bool) -> float:
        """Return the seconds from the loss of a host to the end of its round or job.

        With ``first``, the lost host ran the batch process, so another host requeues the job. Slurm
        ends a job without spares as soon as Slurm considers the host lost.
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


class HostSpeeds:
    """Speeds of the hosts of the running job. A step waits for the slowest host."""

    def __init__(self, hosts: int, disturbances: Disturbances, seed: str) -> None:
        self._hosts, self._disturbances = hosts, disturbances
        self._steps = random.Random(f"{seed} spread")
        self._chosen = random.Random(f"{seed} slow hosts")
        self._slow = 0

    def new_job(self) -> bool:
        """Choose hosts for a new job. Return whether some of them are slow."""
        self._slow = sum(self._is_slow() for _ in range(self._hosts))
        return self._slow > 0

    def replace_host(self) -> None:
        """Replace a random host by a spare."""
        if self._chosen.random() * self._hosts < self._slow:
            self._slow -= 1
        self._slow += self._is_slow()

    def factor(self) -> float:
        """Return the seconds of the next step divided by its seconds on hosts of normal speed."""
        sigma = self._disturbances.stragglers
        found = self._disturbances.slow_factor if self._slow else 1.0
        if sigma:
            share = math.pow(self._steps.random(), 1 / self._hosts)
            slowest = NormalDist().inv_cdf(min(max(share, 1e-12), 1 - 1e-12))
            found *= math.exp(sigma * slowest)
        return found

    def _is_slow(self) -> bool:
        share = self._disturbances.slow_hosts
        return share > 0 and self._chosen.random() < share
