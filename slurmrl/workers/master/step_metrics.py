"""Metrics of a step, aggregated from the ranks' answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from slurmrl.config.schema import WHOLE
from slurmrl.graph.call import Method
from slurmrl.monitor.metrics import encode
from slurmrl.plan.metrics import EVALUATION_S, evaluation_metric
from slurmrl.plan.model import CallPlan
from slurmrl.workers.messages import Done

Answers = Mapping[int, Done]
"""By rank."""
Answered = list[tuple[CallPlan, Answers]]
"""The answers to each executed call. A call that candidates went through occurs once a round."""


def mean_stats(call: CallPlan, *rounds: Answers) -> dict[str, float]:
    """Return means over all items. A training call's stats are global already, the same on
    every rank; those of other calls are sums and counts over a rank's part and are added up."""
    ranks = call.ranks[:1] if call.method == Method.TRAIN_STEP else call.ranks
    sums = _sums(ranks, rounds)
    return {name: total / count for name, (total, count) in sums.items() if count}


def _sums(ranks: Sequence[int], rounds: Sequence[Answers]) -> dict[str, tuple[float, float]]:
    """Sum and count of each metric over ranks and rounds."""
    sums: dict[str, list[float]] = {}
    for answers, rank in product(rounds, ranks):
        for name, (total, count) in answers[rank].stats.items():
            pair = sums.setdefault(name, [0.0, 0.0])
            pair[0] += total
            pair[1] += count
    return {name: (total, count) for name, (total, count) in sums.items()}


def seconds(*rounds: Answers) -> float:
    """Return the time of a call: that of its slowest rank, of all rounds together."""
    return sum(max(answer.seconds for answer in answers.values()) for answers in rounds)


def of_step(calls: Sequence[tuple[CallPlan, Answers]], step_s: float) -> dict[str, Any]:
    """Metrics of one step: the calls' stats, their times, and tokens per second."""
    metrics: dict[str, Any] = {}
    rounds: dict[str, list[Answers]] = {}
    for call, answers in calls:
        rounds.setdefault(call.name, []).append(answers)
    for call in {call.name: call for call, _ in calls}.values():
        metrics.update(mean_stats(call, *rounds[call.name]))
    tokens = sum(calls[-1][1][rank].tokens for rank in calls[-1][0].ranks)
    metrics["tokens"] = tokens
    metrics["tokens_per_s"] = tokens / step_s
    metrics["time/step"] = step_s
    metrics.update({f"time/{name}": seconds(*answers) for name, answers in rounds.items()})
    return metrics


def of_evaluation(metrics: Mapping[str, Any], suite: str = WHOLE) -> dict[str, Any]:
    """Metrics of the evaluation of a suite, from those of its calls (`of_step`): of the times, only
    the whole."""
    own = {name: value for name, value in metrics.items() if not name.startswith("time/")}
    named = {f"{evaluation_metric(suite)}{name}": value for name, value in own.items()}
    seconds = EVALUATION_S if suite == WHOLE else f"{EVALUATION_S}/{suite}"
    return {**named, seconds: metrics["time/step"]}


def texts(calls: Sequence[tuple[CallPlan, Answers]]) -> list[Mapping[str, Any]]:
    """Readable samples of the batch, or of the first candidates for it, from whichever calls give
    some, with the notes of all calls on them. Notes on others are left out."""
    first = {call.name: (call, answers) for call, answers in reversed(calls)}
    names = dict.fromkeys(call.name for call, _ in calls)
    answered = [first[name] for name in names]
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, text in enumerate(_each(answered, lambda done: done.texts)):
        place = (text.get("id", f"row {number}"), text.get("index", 0))
        rows[place if place not in rows else (*place, number)] = dict(text)
    for note in _each(calls, lambda done: done.notes):
        if (row := rows.get((note["id"], note["index"]))) is not None:
            row.update({key: note[key] for key in note if key not in ("id", "index")})
    return list(rows.values())


def _each(
    calls: Iterable[tuple[CallPlan, Answers]], rows: Callable[[Done], Sequence[Mapping[str, Any]]]
) -> Iterator[Mapping[str, Any]]:
    for call, answers in calls:
        for rank in call.ranks:
            yield from rows(answers[rank])


def sample_lines(step: int, rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Readable samples as JSON lines, whatever numbers they hold."""
    return b"".join(encode({"step": step, **row}) for row in rows)
