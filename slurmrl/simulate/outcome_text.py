"""The outcome of a simulation for people and as JSON values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slurmrl.display.terminal import Block, Document, Lines, Table
from slurmrl.simulate.several_runs import CommitAdvice, Runs, RunSpread
from slurmrl.simulate.trial_costs import TrialCosts
from slurmrl.simulate.trial_run import PARTS, QUEUE


@dataclass(frozen=True)
class SimulationAnswers:
    """Everything that a simulation says."""

    title: str
    costs: TrialCosts
    runs: Sequence[Runs]
    """One for each time limit."""
    seed: int
    commit: CommitAdvice | None
    tasks_needed: int | None
    step_source: tuple[str, ...]
    """Lines with the source and the error of the seconds of a step."""

    @property
    def best(self) -> Runs:
        """The runs with the time limit with which most runs finish, and finish earliest."""
        return min(self.runs, key=lambda one: (-one.finished, one.seconds.middle))


def document(answers: SimulationAnswers) -> Document:
    """Return tables of the time limits and of the parts of the time, and the advice."""
    costs = answers.costs
    count = len(answers.runs[0].outcomes)
    gpus = costs.gpus + (0 if costs.tasks is None or costs.tasks.inside else _task_gpus(costs))
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


def _task_gpus(costs: TrialCosts) -> int:
    assert costs.tasks is not None
    return costs.tasks.count * costs.tasks.gpus


def _blocks(answers: SimulationAnswers) -> Iterator[Block]:
    costs, best = answers.costs, answers.best
    several = len(best.outcomes) > 1
    headings = ("TIME LIMIT", "FINISHED", "WALL TIME", "JOBS", "GPU HOURS", "TRAINING")
    note = "intervals hold 80 % of the runs; " if several else ""
    note += "TRAINING: share of the time in jobs in which steps are made that count"
    yield Table(headings, [_row(one) for one in answers.runs], note=note)
    where = f"time with the limit {limit_words(best.time_limit_s)}" if answers.runs[1:] else "time"
    total = sum(best.parts.values()) or 1.0
    rows = [
        (name, words(best.parts[name]), f"{best.parts[name] / total:.1%}")
        for name in PARTS
        if best.parts.get(name)
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
        _spread(runs.seconds),
        _numbers(runs.jobs),
        _numbers(runs.gpu_hours),
        f"{runs.useful:.1%}",
    ]


def advice(answers: SimulationAnswers) -> list[str]:
    """Return one sentence for each question that the simulation answers."""
    costs, best = answers.costs, answers.best
    said = []
    if best.links > costs.slurm.links:
        said.append(
            f"jobs: {best.links} links are used and {costs.slurm.links} are queued at first; if "
            f"sbatch fails on compute nodes, set cluster.slurm.links={best.links}"
        )
    else:
        said.append(f"jobs: {best.links} of {costs.slurm.links} links are used")
    if answers.commit is not None:
        commit = answers.commit
        said.append(
            f"commits: every {commit.steps} steps ({words(commit.seconds)}) lose least, about "
            f"{commit.lost:.1%}, with a failure every {words(commit.between_failures_s)}; now: "
            f"{_commits(costs)}"
        )
    if costs.tasks is not None:
        need = answers.tasks_needed
        enough = "no number is" if need is None else f"at least {need} are"
        said.append(
            f"rollout tasks: {enough} as fast as the trainers; simulated: {costs.tasks.count}"
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


def _spread(spread: RunSpread) -> str:
    if words(spread.low) == words(spread.high):
        return words(spread.middle)
    return f"{words(spread.middle)} ({words(spread.low)} to {words(spread.high)})"


def _numbers(spread: RunSpread) -> str:
    middle, low, high = (_number(one, 4) for one in (spread.middle, spread.low, spread.high))
    return middle if low == high else f"{middle} ({low} to {high})"


def _number(number: float, digits: int) -> str:
    """Return a number with at least these digits, without an exponent."""
    return f"{number:,.0f}" if number >= 10**digits else f"{number:.{digits}g}"


def values(answers: SimulationAnswers) -> dict[str, Any]:
    """Return the same as JSON values; an infinite limit is null."""
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
        "parts": {name: runs.parts.get(name, 0.0) for name in PARTS},
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
