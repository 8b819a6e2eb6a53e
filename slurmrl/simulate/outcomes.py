"""Runs of one simulation with different seeds: their statistics, advice and report."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import mean, median, quantiles
from typing import Any, Final

from slurmrl.display.terminal import Block, Document, Lines, Table
from slurmrl.simulate.trial_costs import DAY_S, Conditions, Disturbances, TaskCosts, TrialCosts
from slurmrl.simulate.trial_run import PARTS, QUEUE, TrialOutcome, TrialRun

MOST_TASKS: Final = 100_000
"""Largest number of rollout tasks that `tasks_needed` tries."""


@dataclass(frozen=True)
class RunSpread:
    """Distribution of a quantity over the runs."""

    middle: float
    """Median."""
    low: float
    """10th percentile."""
    high: float
    """90th percentile."""

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
    """Description of the source of the queue waits."""

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
        """Maximum number of links that a run used."""
        return max(one.links for one in self.outcomes)

    @property
    def useful(self) -> float:
        return mean(one.useful for one in self.outcomes)

    @property
    def parts(self) -> dict[str, float]:
        """Mean seconds of each part of the time."""
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
        queue = f"the first job waits {first_s:.0f} s; later jobs: {queue}"
    return Runs(conditions.time_limit_s, outcomes, queue)


@dataclass(frozen=True)
class CommitAdvice:
    """The interval between commits that minimizes lost time (Young 1974, Daly 2006)."""

    seconds: float
    steps: int
    lost: float
    """Share of job time that commits, repeated work and restarts take with this interval."""
    between_failures_s: float


def commit_advice(costs: TrialCosts, disturbances: Disturbances) -> CommitAdvice | None:
    """Return the best interval, or None without failures.

    A job commits before a time limit or a preemption, so only failures lose work.
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
    """Return the minimum number of rollout tasks that make groups as fast as steps use them.

    Return None if no number is enough, because the limit on groups in flight also limits the speed.
    """
    tasks = costs.tasks
    if tasks is None:
        return None
    wanted = costs.batch_size / costs.step_s
    in_flight = (tasks.settings.max_staleness + 1) * costs.batch_size
    if tasks.settings.max_in_flight is not None:
        in_flight = min(in_flight, tasks.settings.max_in_flight)
    counts = range(1, min(MOST_TASKS, in_flight) + 1)
    place = bisect_left(counts, wanted, key=lambda count: _rate(tasks, in_flight, count))
    return counts[place] if place < len(counts) else None


def _rate(tasks: TaskCosts, in_flight: int, count: int) -> float:
    """Return the groups per second of ``count`` tasks that share the groups in flight."""
    each = in_flight / count
    return min(count, in_flight) * tasks.groups_per_s(max(each, 1.0))


@dataclass(frozen=True)
class SimulationAnswers:
    """Results of a simulation."""

    title: str
    costs: TrialCosts
    runs: Sequence[Runs]
    """The runs with each time limit."""
    seed: int
    commit: CommitAdvice | None
    tasks_needed: int | None
    step_source: tuple[str, ...]
    """Lines about the source of the seconds of a step, and about their error."""

    @property
    def best(self) -> Runs:
        """The runs of the best time limit, at which most runs finish (on a tie, the fastest)."""
        return min(self.runs, key=lambda one: (-one.finished, one.seconds.middle))


def document(answers: SimulationAnswers) -> Document:
    """Return the report: a table of time limits, a table of the parts of the time, and advice."""
    costs = answers.costs
    count = len(answers.runs[0].outcomes)
    gpus = costs.gpus
    if costs.tasks is not None and not costs.tasks.inside:
        gpus += costs.tasks.count * costs.tasks.gpus
    size = _count(costs.hosts, "host")
    if costs.spares:
        size += f" and {_count(costs.spares, 'spare')}"
    if costs.tasks is not None:
        size += f", {_count(costs.tasks.count, 'rollout task')}"
    subtitle = f"{costs.steps} steps on {size}" + (f" ({gpus} GPUs)" if gpus else "")
    seeds = f"seed {answers.seed}" if count == 1 else f"{count} runs from seed {answers.seed}"
    return Document(answers.title, list(_blocks(answers)), subtitle=f"{subtitle}; {seeds}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def _blocks(answers: SimulationAnswers) -> Iterator[Block]:
    costs, best = answers.costs, answers.best
    several = len(best.outcomes) > 1
    headings = ("TIME LIMIT", "FINISHED", "WALL TIME", "JOBS", "GPU HOURS", "TRAINING")
    note = "ranges contain 80 % of the runs; " if several else ""
    note += "TRAINING: share of job time in steps that no failure undid"
    yield Table(headings, [_row(one) for one in answers.runs], note=note)
    where = f"time with the limit {limit_words(best.time_limit_s)}" if answers.runs[1:] else "time"
    total = sum(best.parts.values()) or 1.0
    rows = [
        (name, words(best.parts[name]), f"{best.parts[name] / total:.1%}")
        for name in PARTS
        if best.parts[name]
    ]
    yield Table(("PART", "TIME", "SHARE"), rows, title=f"{where}, mean of the runs:")
    if best.events:
        said = [f"{_number(count, 3)} {name}" for name, count in sorted(best.events.items())]
        yield Lines(f"mean of events: {', '.join(said)}")
    reasons = {one.why for runs in answers.runs for one in runs.outcomes if not one.finished}
    for reason in sorted(reasons):
        yield Lines(f"not finished: {reason}")
    yield Lines("advice:", advice(answers))
    sources = [f"a step: {_number(costs.step_s, 3)} s", *answers.step_source]
    sources.append(f"queue: {best.queue}")
    sources += [f"assumed: {line}" for line in costs.assumed]
    yield Lines("sources:", sources)


def _row(runs: Runs) -> list[str]:
    return [
        limit_words(runs.time_limit_s),
        f"{runs.finished} of {len(runs.outcomes)}",
        _range(runs.seconds, words),
        _range(runs.jobs, partial(_number, digits=4)),
        _range(runs.gpu_hours, partial(_number, digits=4)),
        f"{runs.useful:.1%}",
    ]


def advice(answers: SimulationAnswers) -> list[str]:
    """Return one sentence for each question that the simulation answers."""
    costs, best = answers.costs, answers.best
    said = []
    if best.links > costs.slurm.links:
        said.append(
            f"jobs: {best.links} links are used, and submit queues {costs.slurm.links}; if sbatch "
            f"fails on compute nodes, set cluster.slurm.links={best.links}"
        )
    else:
        said.append(f"jobs: {best.links} of {costs.slurm.links} links are used")
    if answers.commit is not None:
        commit = answers.commit
        said.append(
            f"commits: an interval of {commit.steps} steps ({words(commit.seconds)}) loses the "
            f"least time, about {commit.lost:.1%}, with a failure every "
            f"{words(commit.between_failures_s)}; now: {_commits(costs)}"
        )
    if costs.tasks is not None:
        need = answers.tasks_needed
        enough = "no number is enough" if need is None else f"at least {need} are needed"
        said.append(
            f"rollout tasks: {enough} to keep up with the trainers; simulated: {costs.tasks.count}"
            + ("; raise max_staleness or max_in_flight" if need is None else "")
        )
    said.append(f"shared directory: at most {best.operations_per_s:.0f} file operations per second")
    return said


def _commits(costs: TrialCosts) -> str:
    times = costs.checkpoint
    found = []
    if times.every_steps is not None:
        found.append(f"every {times.every_steps} steps")
    if times.every_seconds is not None:
        found.append(f"every {words(times.every_seconds)}")
    return " or ".join(found) or "only at the end of a job"


def words(seconds: float) -> str:
    """Return a time with its two largest units."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h"


def limit_words(seconds: float) -> str:
    return "none" if math.isinf(seconds) else words(seconds)


def _range(spread: RunSpread, show: Callable[[float], str]) -> str:
    middle, low, high = map(show, (spread.middle, spread.low, spread.high))
    return middle if low == high else f"{middle} ({low} to {high})"


def _number(number: float, digits: int) -> str:
    """Format a number with at least ``digits`` digits and without an exponent."""
    return f"{number:,.0f}" if number >= 10**digits else f"{number:.{digits}g}"


def values(answers: SimulationAnswers) -> dict[str, Any]:
    """Return the results of a simulation as JSON values; an infinite time limit is null."""
    costs = answers.costs
    return {
        "seed": answers.seed,
        "steps": costs.steps,
        "hosts": costs.hosts,
        "gpus": costs.gpus,
        "rollout_tasks": None if costs.tasks is None else costs.tasks.count,
        "step_s": costs.step_s,
        "step_source": list(answers.step_source),
        "queue": answers.best.queue,
        "assumed": list(costs.assumed),
        "time_limits": [_runs(one) for one in answers.runs],
        "commit": None if answers.commit is None else asdict(answers.commit),
        "rollout_tasks_needed": answers.tasks_needed,
    }


def _runs(runs: Runs) -> Mapping[str, Any]:
    return {
        "time_limit_s": None if math.isinf(runs.time_limit_s) else runs.time_limit_s,
        "queue": runs.queue,
        "finished": runs.finished,
        "seconds": asdict(runs.seconds),
        "gpu_hours": asdict(runs.gpu_hours),
        "jobs": asdict(runs.jobs),
        "links": runs.links,
        "useful": runs.useful,
        "parts": runs.parts,
        "events": runs.events,
        "operations_per_s": runs.operations_per_s,
        "runs": [
            {
                "finished": one.finished,
                "why": one.why,
                "steps": one.steps,
                "seconds": one.seconds,
                "queue_s": one.parts.get(QUEUE, 0.0),
                "jobs": one.jobs,
                "incarnations": one.incarnations,
                "gpu_hours": one.gpu_s / 3600,
                "events": dict(one.events),
            }
            for one in runs.outcomes
        ],
    }
