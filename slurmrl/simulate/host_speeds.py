"""Speeds of the trainers' hosts: a spread in each step, and hosts that stay slow."""

from __future__ import annotations

import math
import random
from statistics import NormalDist

from slurmrl.simulate.trial_costs import Disturbances


class HostSpeeds:
    """The hosts of the running job. A step waits for the slowest one."""

    def __init__(self, hosts: int, disturbances: Disturbances, seed: str) -> None:
        self._hosts, self._disturbances = hosts, disturbances
        self._steps = random.Random(f"{seed} spread")
        self._chosen = random.Random(f"{seed} slow hosts")
        self._slow = 0

    def new_job(self) -> bool:
        """Choose hosts for a new job; return whether some of them are slow."""
        self._slow = sum(self._is_slow() for _ in range(self._hosts))
        return self._slow > 0

    def replace_host(self) -> None:
        """Replace a random host by a spare."""
        if self._chosen.random() * self._hosts < self._slow:
            self._slow -= 1
        self._slow += self._is_slow()

    def factor(self) -> float:
        """Return the seconds of the next step divided by the seconds on usual hosts."""
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
