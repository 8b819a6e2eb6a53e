"""Several runs of one simulation with different seeds, and the advice that follows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median, quantiles
from typing import Final

from slurmrl.simulate.trial_costs import DAY_S, Conditions, Disturbances, TaskCosts, TrialCosts
from slurmrl.simulate.trial_run import PARTS, TrialOutcome, TrialRun

MOST_TASKS: Final = 100_000
"""Rollout tasks beyond which no number is looked for."""


@dataclass(frozen=True)
class RunSpread:
    """A number in several runs: its median, and the bounds of the middle 80 %."""

    middle: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> RunSpread:
        if len(values) == 1:
            return RunSpread(values[0], values[0], values[0])
        tenths = quantiles(values, n=10, method="inclusive")
        return RunSpread(median(values), tenths[0], tenths[-1])


@dataclass(frozen=True)
class Runs:
    """The runs with one time limit."""

    time_limit_s: float
    outcomes: Sequence[TrialOutcome]
    queue: str
    """The source of the waits, for people."""

    @property
    def finished(self) -> int:
        return sum(one.finished for one in self.outcomes)

    @property
    def seconds(self) -> RunSpread:
        return RunSpread.of([one.seconds for one in self.outcomes])

    @property
    def gpu_hours(self) -> RunSpread:
        return RunSpread.of([one.gpu_s / 3600 for one in self.outcomes])

    @property
    def jobs(self) -> RunSpread:
        return RunSpread.of([float(one.jobs) for one in self.outcomes])

    @property
    def links(self) -> int:
        """Most elements of the chain that a run used."""
        return max(one.links for one in self.outcomes)

    @property
    def useful(self) -> float:
        return mean(one.useful for one in self.outcomes)

    @property
    def parts(self) -> dict[str, float]:
        """Mean seconds of each part."""
        return {name: mean(one.parts[name] for one in self.outcomes) for name in PARTS}

    @property
    def events(self) -> dict[str, float]:
        """Mean number of each event."""
        total: Counter[str] = Counter()
        for one in self.outcomes:
            total.update(one.events)
        return {name: count / len(self.outcomes) for name, count in total.items()}

    @property
    def operations_per_s(self) -> float:
        return max(one.operations_per_s for one in self.outcomes)


def run_all(
    costs: TrialCosts,
    conditions: Conditions,
    seeds: Sequence[int],
    progress: Callable[[str], None] = lambda line: None,
) -> Runs:
    """Run a simulation once for each seed."""
    outcomes = []
    for number, seed in enumerate(seeds, 1):
        progress(f"run {number} of {len(seeds)}")
        outcomes.append(TrialRun(costs, conditions, str(seed)).run())
    queue, first_s = conditions.waits.words, conditions.first_wait_s
    if first_s is not None:
        queue = f"the first job waits {first_s:.0f} s; of later ones: {queue}"
    return Runs(conditions.time_limit_s, outcomes, queue)


@dataclass(frozen=True)
class CommitAdvice:
    """The interval between commits that loses least time (Young 1974, Daly 2006)."""

    seconds: float
    steps: int
    lost: float
    """Share of the time in jobs that commits, repeated work and restarts then take."""
    between_failures_s: float


def commit_advice(costs: TrialCosts, disturbances: Disturbances) -> CommitAdvice | None:
    """Return the best interval; None without failures.

    A commit at a warning (time limit, preemption) loses nothing, so only failures count.
    """
    rate = (disturbances.failures + disturbances.crashes) * costs.hosts
    if not rate:
        return None
    between_s, stall_s = DAY_S / rate, max(costs.stall_s, 1e-3)
    best = math.sqrt(2 * stall_s * between_s)
    seconds = max(best, costs.write_s, costs.step_s)
    steps = max(1, round(seconds / costs.step_s))
    seconds = steps * costs.step_s
    lost = stall_s / seconds + (seconds / 2 + costs.restart_s) / between_s
    return CommitAdvice(seconds, steps, min(lost, 1.0), between_s)


def tasks_needed(costs: TrialCosts) -> int | None:
    """Return the least number of rollout tasks that make groups as fast as steps use them.

    Return None if no number does: with few groups in flight, further tasks do not help.
    """
    tasks = costs.tasks
    if tasks is None:
        return None
    wanted = costs.batch_size / costs.step_s
    in_flight = (tasks.settings.max_staleness + 1) * costs.batch_size
    if tasks.settings.max_in_flight is not None:
        in_flight = min(in_flight, tasks.settings.max_in_flight)
    low, high = 0, 1
    while _rate(tasks, in_flight, high) < wanted:
        low, high = high, 2 * high
        if low > min(MOST_TASKS, in_flight):
            return None
    while high - low > 1:
        middle = (low + high) // 2
        enough = _rate(tasks, in_flight, middle) >= wanted
        low, high = (low, middle) if enough else (middle, high)
    return high


def _rate(tasks: TaskCosts, in_flight: int, count: int) -> float:
    """Groups per second of a number of tasks that share the groups in flight."""
    each = in_flight / count
    return min(count, in_flight) * tasks.groups_per_s(max(each, 1.0))
