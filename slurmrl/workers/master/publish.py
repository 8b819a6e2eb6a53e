"""The master's reports of steps: the run's status, the metrics of steps, and ``timeline.json``.

``slurmrl status`` shows the status. Its ages use the master's clock. Reports show the timeline,
with the times of calls and the memory of ranks in the newest steps. The master replaces the
timeline every few seconds, so the last steps may be missing after a failure.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from slurmrl import log
from slurmrl.backoff import Interval
from slurmrl.config.schema import WHOLE
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.fsio import atomic, documents
from slurmrl.name_resolve.store import NameStore
from slurmrl.plan.dataflow import Method
from slurmrl.plan.metric_names import EVALUATION_S, evaluation_metric
from slurmrl.plan.model import CallPlan
from slurmrl.run import hang, keys, metrics
from slurmrl.run.channel import message_log
from slurmrl.run.hang import LeaseNote, RankProgress
from slurmrl.run.lease import LeaseObserver, LeaseView
from slurmrl.run.metrics import encode
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Identity, RolloutsView
from slurmrl.workers.messages import Done

logger = log.get(__name__)


class StatusPublisher:
    """Replaces the published status once per interval and at every update."""

    def __init__(
        self,
        names: NameStore,
        paths: RunPaths,
        agents: Mapping[str, Identity],
        *,
        incarnation: int,
        total_steps: int | None,
        lease_ttl_s: float,
        interval_s: float,
    ) -> None:
        self._names = names
        self._paths = paths
        self._agents = agents
        self._lease_ttl_s = lease_ttl_s
        self._observers: dict[Path, LeaseObserver] = {}
        self._views: dict[str, LeaseView] = {}
        """Mapping from the label of each known agent to the view of its lease."""
        self._tasks: dict[str, Any] = {}
        """Lease age, host, attempt and job of each known agent at the last read, by label."""
        self._looks = Interval(interval_s, time.monotonic)
        self._committed: tuple[int, float] | None = None
        self._status: dict[str, Any] = {
            "incarnation": incarnation,
            "step": 0,
            "total_steps": total_steps,
            "phase": "starting",
            "metrics": {},
            "checkpoint_failed": None,
            "waiting": None,
            "doing": [],
        }

    def update(self, **changes: Any) -> None:
        """Change the status and publish it now.

        The keys are ``step``, ``total_steps``, ``metrics``, ``phase`` and ``checkpoint_failed``
        (step and reason of the newest failed checkpoint, until a checkpoint succeeds).
        """
        self._status.update(changes, waiting=None)
        self._publish_now()

    def committed(self, step: int) -> None:
        self._committed = (step, time.monotonic())
        self._status["checkpoint_failed"] = None
        self._publish_now()

    def tick(
        self,
        waiting: Callable[[], Mapping[str, Any] | None] = lambda: None,
        rollouts: Callable[[], RolloutsView] | None = None,
    ) -> None:
        """Publish if the interval has passed. ``waiting`` returns the master's current wait."""
        if self._looks.due():
            self._status["waiting"] = waiting()
            if rollouts is not None:
                self._status["rollouts"] = documents.to_json(rollouts())
            self._look_at_agents()
            self._publish()

    def doing(self) -> list[RankProgress]:
        """Return the activity of the ranks at the last read of the agents' leases."""
        rows: list[RankProgress] = []
        for view in self._views.values():
            try:
                frames, _ = message_log.decode(view.note)
                notes = [documents.from_json(LeaseNote, values, "a lease") for values in frames[:1]]
            except CorruptFileError:
                continue
            for note in notes:
                if note.incarnation == self._status["incarnation"]:
                    rows += note.doing
        return rows

    def dead(self) -> list[str]:
        """Return the labels of agents whose leases had expired at the last read.

        Omit agents that have restarted since then.
        """
        return [
            label
            for label, view in self._views.items()
            if not view.alive
            and label in self._agents
            and self._tasks[label]["attempt"] == self._agents[label].attempt
        ]

    def _publish_now(self) -> None:
        """Publish now. Read the agents' leases only once per interval."""
        if self._looks.due():
            self._look_at_agents()
        self._publish()

    def _look_at_agents(self) -> None:
        self._views = {label: self._view(self._agents[label]) for label in sorted(self._agents)}
        self._tasks = {label: self._task(label) for label in self._views}
        self._status["doing"] = [group.document() for group in hang.grouped(self.doing())]

    def _publish(self) -> None:
        checkpoint = None
        if self._committed is not None:
            step, committed_at = self._committed
            checkpoint = {"step": step, "age_s": time.monotonic() - committed_at}
        value = {
            **self._status,
            "metrics": metrics.finite(self._status["metrics"]),
            "checkpoint": checkpoint,
            "tasks": self._tasks,
            "time": time.time(),
        }
        try:
            self._names.add(keys.status(), json.dumps(value), replace=True, durable=False)
        except EnvironmentFailure as error:  # Only `slurmrl status` is affected.
            logger.warning("cannot publish the status, will retry: %s", error)

    def _view(self, agent: Identity) -> LeaseView:
        path = self._paths.lease(agent.group, agent.task, agent.attempt)
        if path not in self._observers:
            self._observers[path] = LeaseObserver(path, ttl_s=self._lease_ttl_s)
        return self._observers[path].observe()

    def _task(self, label: str) -> dict[str, Any]:
        agent = self._agents[label]
        return {
            "lease_age_s": self._views[label].age_s,
            "host": agent.host,
            "attempt": agent.attempt,
            "job_id": agent.job_id,
        }


Answers = Mapping[int, Done]
"""Mapping from a rank to its answer to a call."""
Answered = list[tuple[CallPlan, Answers]]
"""Executed calls with their answers. A call that processes candidates occurs once per round."""


def mean_stats(call: CallPlan, *rounds: Answers) -> dict[str, float]:
    """Return the mean of each metric over all items.

    Training calls report global sums, which are equal on every rank. Other calls report sums over
    the rank's part, which this function adds up.
    """
    ranks = call.ranks[:1] if call.method == Method.TRAIN_STEP else call.ranks
    sums: dict[str, list[float]] = {}
    for answers, rank in product(rounds, ranks):
        for name, (total, count) in answers[rank].stats.items():
            pair = sums.setdefault(name, [0.0, 0.0])
            pair[0] += total
            pair[1] += count
    return {name: total / count for name, (total, count) in sums.items() if count}


def seconds(*rounds: Answers) -> float:
    """Return the seconds of the slowest rank, summed over all rounds of a call."""
    return sum(max(answer.seconds for answer in answers.values()) for answers in rounds)


def of_step(calls: Sequence[tuple[CallPlan, Answers]], step_s: float) -> dict[str, Any]:
    """Return the metrics of one step: stats and times of its calls, and tokens per second."""
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
    """Return the metrics of the evaluation of a suite from the metrics of its calls (`of_step`).

    Replace the times of the calls by the time of the whole evaluation.
    """
    own = {name: value for name, value in metrics.items() if not name.startswith("time/")}
    named = {f"{evaluation_metric(suite)}{name}": value for name, value in own.items()}
    seconds = EVALUATION_S if suite == WHOLE else f"{EVALUATION_S}/{suite}"
    return {**named, seconds: metrics["time/step"]}


def texts(calls: Sequence[tuple[CallPlan, Answers]]) -> list[Mapping[str, Any]]:
    """Return readable samples of the batch, or of its first candidates, with the notes on them.

    All calls may give samples and notes. Omit notes on samples that are not shown.
    """
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
    """Return readable samples as JSON lines. Numbers may be NaN or infinite."""
    return b"".join(encode({"step": step, **row}) for row in rows)


STEPS = 10
MOST_CALLS = 50
"""Maximum number of calls per step in the timeline; a filter may need many rounds."""
MOST_RANKS = 64
"""Maximum number of ranks in the timeline. With both limits, the file has at most about 1 MB."""
EVERY_S = 10.0


class Timeline:
    """The times of the newest steps of this incarnation."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._steps: deque[dict[str, Any]] = deque(maxlen=STEPS)
        self._peaks: dict[int, int] = {}
        self._writes = Interval(EVERY_S, clock)

    def add(self, step: int, answered: Answered) -> None:
        calls = [_call(call, answers) for call, answers in answered[:MOST_CALLS]]
        self._steps.append({"step": step, "calls": calls})
        for _, answers in answered:
            for rank, done in answers.items():
                self._peaks[rank] = max(done.peak_bytes, self._peaks.get(rank, 0))
        if self._writes.due():
            self.write()

    def write(self) -> None:
        """Replace the file. After a failure, only log a warning."""
        if not self._steps:
            return
        peaks = sorted(self._peaks.items())[:MOST_RANKS]
        value = {"steps": list(self._steps), "peaks": peaks}
        try:
            atomic.replace(self._path, json.dumps(value).encode(), durable=False)
        except EnvironmentFailure as error:
            logger.warning("cannot write the timeline, will retry: %s", error)


def _call(call: CallPlan, answers: Mapping[int, Done]) -> dict[str, Any]:
    """Return a call's entry; ``ranks`` are (rank, start in seconds since the epoch, seconds)."""
    ranks = [
        (rank, round(answers[rank].began, 4), round(answers[rank].seconds, 4))
        for rank in call.ranks[:MOST_RANKS]
    ]
    return {"name": call.name, "ranks": ranks}
