"""Metrics of a step, aggregated from the ranks' answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slurmrl.graph.call import Method
from slurmrl.monitor.metrics import encode
from slurmrl.plan.model import CallPlan
from slurmrl.workers.messages import Done

Answers = Mapping[int, Done]
"""By rank."""


def mean_stats(call: CallPlan, answers: Answers) -> dict[str, float]:
    """Return means over the whole batch. A training call's stats are global already, the same on
    every rank; those of other calls are sums and counts over a rank's part and are added up."""
    ranks = call.ranks[:1] if call.method == Method.TRAIN_STEP else call.ranks
    sums: dict[str, list[float]] = {}
    for rank in ranks:
        for name, (total, count) in answers[rank].stats.items():
            pair = sums.setdefault(name, [0.0, 0.0])
            pair[0] += total
            pair[1] += count
    return {name: total / count for name, (total, count) in sums.items() if count}


def seconds(answers: Answers) -> float:
    """Return the time of a call: that of its slowest rank."""
    return max(answer.seconds for answer in answers.values())


def of_step(calls: Sequence[tuple[CallPlan, Answers]], step_s: float) -> dict[str, Any]:
    """Metrics of one step: the calls' stats, their times, and tokens per second."""
    metrics: dict[str, Any] = {}
    for call, answers in calls:
        metrics.update(mean_stats(call, answers))
    tokens = sum(calls[-1][1][rank].tokens for rank in calls[-1][0].ranks)
    metrics["tokens"] = tokens
    metrics["tokens_per_s"] = tokens / step_s
    metrics["time/step"] = step_s
    metrics.update({f"time/{call.name}": seconds(answers) for call, answers in calls})
    return metrics


def of_evaluation(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of an evaluation, from those of its calls (`of_step`): of the times, only the
    whole."""
    own = {name: value for name, value in metrics.items() if not name.startswith("time/")}
    named = {f"eval/{name}": value for name, value in own.items()}
    return {**named, "time/evaluation": metrics["time/step"]}


def texts(calls: Sequence[tuple[CallPlan, Answers]]) -> list[Mapping[str, Any]]:
    """Readable samples of the batch, from whichever calls give some."""
    return [text for call, answers in calls for rank in call.ranks for text in answers[rank].texts]


def sample_lines(step: int, rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Readable samples as JSON lines, whatever numbers they hold."""
    return b"".join(encode({"step": step, **row}) for row in rows)
