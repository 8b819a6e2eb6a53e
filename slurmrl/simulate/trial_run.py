"""One trial on a simulated clock: its jobs, incarnations, steps, commits and failures.

The simulation uses the rules of real trials: the decision to give up (`workers.master.futility`),
the chain (`scheduler.chain`), the times of commits and evaluations
(`config.schema.config.Frequency`), and the ledger of rollout tasks (`task_pool`).
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from slurmrl.data.ledger import LedgerRecord
from slurmrl.errors import NameNotFoundError, ReportedError, UsageError
from slurmrl.fsio import documents
from slurmrl.name_resolve.store import NameStore
from slurmrl.run import keys
from slurmrl.run.history.slots import Kind, Record
from slurmrl.run.reports import Cause, Failure, Report, Warned
from slurmrl.scheduler.base import Continue
from slurmrl.scheduler.chain import shortage
from slurmrl.simulate.host_events import HostLosses, HostSpeeds
from slurmrl.simulate.task_pool import TaskPool
from slurmrl.simulate.trial_costs import (
    DAY_S,
    SIGNAL_EARLY_S,
    Conditions,
    TrialCosts,
    seconds_to_event,
)
from slurmrl.workers.master.futility import TIME_LIMIT, futile_start
from slurmrl.workers.master.progress import frequency
from slurmrl.workers.polling import PollIntervals

QUEUE: Final = "queue"
START: Final = "start"
TRAINING: Final = "training"
WAITING: Final = "waiting for rollout tasks"
EVALUATION: Final = "evaluation"
COMMIT: Final = "commit"
WEIGHTS: Final = "publication of weights"
DETECTION: Final = "detection of failures"
REPEATED: Final = "work lost and repeated"
PARTS: Final = (TRAINING, EVALUATION, WAITING, WEIGHTS, COMMIT, START, DETECTION, REPEATED, QUEUE)
"""The parts of a trial's time, in the order of the report."""
MOST_WITHOUT_COMMIT: Final = 100
"""Number of consecutive jobs without a commit after which a simulation gives up."""
LONGEST_WAIT_S: Final = 10 * DAY_S
"""Maximum wait for the groups of one step."""
KILLED: Final = "killed"
"""Reason of an end by Slurm, at the time limit or a preemption. Such an end is not a failure."""


class MemoryNames(NameStore):
    """A name store in memory."""

    def __init__(self) -> None:
        super().__init__(Path("/nonexistent"))
        self._values: dict[str, str] = {}

    def get(self, name: str) -> str:
        if name not in self._values:
            raise NameNotFoundError(f"no key {name!r}")
        return self._values[name]

    def find_subtree(self, root: str) -> list[str]:
        return sorted(key for key in self._values if key.startswith(f"{root}/"))

    def report(self, key: str, said: Report) -> None:
        """Add a report unless the key exists."""
        self._values.setdefault(key, json.dumps(documents.to_json(said)))


@dataclass(frozen=True)
class TrialOutcome:
    """Result of one simulated trial."""

    finished: bool
    why: str
    """Reason why the trial ended before its last step; empty if it finished."""
    steps: int
    """Number of committed steps."""
    seconds: float
    parts: Mapping[str, float]
    """Mapping from a part of the time to its seconds. The sum is `seconds`."""
    jobs: int
    """Number of starts of the trainers' jobs."""
    links: int
    """Number of used links of the chain."""
    incarnations: int
    gpu_s: float
    operations_per_s: float
    """Maximum file operations per second on the shared directory while jobs run."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Number of events of each kind, such as lost hosts and preemptions."""

    @property
    def useful(self) -> float:
        """Share of job time spent on training steps that no failure undid."""
        held = self.seconds - self.parts.get(QUEUE, 0.0)
        return self.parts.get(TRAINING, 0.0) / held if held > 0 else 0.0


@dataclass
class _Written:
    """A written checkpoint, with the state after its step."""

    step: int
    ready_at: float
    commits: Mapping[str, int]
    evaluations: Mapping[str, int]
    ledger: LedgerRecord | None


class TrialRun:
    """One run of a simulation. Call `run` only once."""

    def __init__(self, costs: TrialCosts, conditions: Conditions, seed: str) -> None:
        self._costs, self._conditions = costs, conditions
        self._config = costs.config
        self._queue = random.Random(f"{seed} queue")
        self._faults = random.Random(f"{seed} faults")
        self._lengths = random.Random(f"{seed} speeds")
        self._speeds = HostSpeeds(costs.hosts, conditions.disturbances, seed)
        self._signals = random.Random(f"{seed} signals")
        self._now = 0.0
        self._parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._uncommitted: deque[tuple[int, dict[str, float]]] = deque()
        """Each step after the last commit, and its seconds by part."""
        self._of_step = dict.fromkeys(PARTS, 0.0)
        """Mapping from a part of the current step to its seconds."""
        self._events: Counter[str] = Counter()
        self._records: list[Record] = []
        self._names = MemoryNames()
        self._committed: _Written | None = None
        self._writing: _Written | None = None
        self._incarnations = 0
        self._step = 0
        self._commits_since_extension = 0
        hosts = costs.hosts + (costs.tasks.count if costs.tasks is not None else 0)
        self._hosts = hosts
        intervals = PollIntervals.of(hosts, self._config.cluster.heartbeat_s)
        self._ttl_s = self._config.cluster.lease_ttl_s
        self._losses = HostLosses(
            costs.hosts, costs.spares, conditions.disturbances, self._ttl_s, intervals.status_s
        )
        self._pool = None
        if costs.tasks is not None:
            self._pool = TaskPool(
                costs.tasks,
                costs.batch_size,
                conditions.disturbances,
                conditions.task_waits,
                lease_ttl_s=self._ttl_s,
                look_s=intervals.results_s,
                seed=seed,
            )
        # Times at which events of the running job are planned.
        self._kill_at = self._warn_at = self._lost_at = self._crash_at = math.inf
        self._preempt_at = math.inf
        self._preempted = False

    # -- jobs --------------------------------------------------------------------------------

    def run(self) -> TrialOutcome:
        """Run the trial to its end; return the result."""
        costs, slurm = self._costs, self._costs.slurm
        goes_on = Continue(slurm.continue_)
        queued, links, jobs, restart, gpu_s = slurm.links - 1, 1, 0, 0, 0.0
        why, fruitless = "", 0
        while True:
            self._wait_in_queue(first=jobs == 0)
            jobs += 1
            before = self._committed
            began = self._now
            ended = self._job(f"{links}.{restart}")
            gpu_s += (self._now - began) * costs.gpus
            if self._pool is not None:
                self._pool.job_ended(self._now)
            if ended in ("finished", "failed"):
                break
            fruitless = fruitless + 1 if self._committed is before else 0
            if fruitless >= MOST_WITHOUT_COMMIT:
                why = f"{fruitless} jobs in a row ended before a commit"
                break
            if goes_on is Continue.NONE:
                why = "nothing follows the job (continue: none)"
                break
            if goes_on is Continue.REQUEUE and ended == KILLED:
                why = "Slurm killed the job at its limit before it was requeued"
                break
            if goes_on is Continue.REQUEUE or ended in ("lost", "preempted"):
                restart += 1
                continue
            if shortage(queued, has_committed=self._commits_since_extension > 0) is None:
                queued += slurm.links
                self._commits_since_extension = 0
            if queued == 0:
                why = "no link is left: slurmrl resume would continue the trial"
                break
            queued, links, restart = queued - 1, links + 1, 0
        if self._pool is not None:
            self._pool.finish(self._now)
            if not self._pool.costs.inside:  # `costs.gpus` counts GPUs in the trainers' job.
                gpu_s += self._pool.gpu_s
            dropped = self._pool.dropped.items()
            self._events.update({f"dropped groups ({why})": count for why, count in dropped})
        return TrialOutcome(
            finished=ended == "finished",
            why=why or self._futile,
            steps=0 if self._committed is None else self._committed.step,
            seconds=self._now,
            parts=dict(self._parts),
            jobs=jobs,
            links=links,
            incarnations=self._incarnations,
            gpu_s=gpu_s,
            operations_per_s=self._operations_per_s(),
            events=dict(+self._events),
        )

    _futile = ""

    def _operations_per_s(self) -> float:
        hosts = self._hosts
        intervals = PollIntervals.of(hosts, self._config.cluster.heartbeat_s)
        held_s = self._now - self._parts[QUEUE]
        of_tasks = 0 if self._pool is None else self._pool.all_operations
        return intervals.operations_per_s(hosts) + (of_tasks / held_s if held_s > 0 else 0.0)

    def _wait_in_queue(self, *, first: bool) -> None:
        given = self._conditions.first_wait_s
        sampled = self._conditions.waits.sample(self._queue)
        wait_s = given if first and given is not None else sampled
        self._parts[QUEUE] += wait_s
        self._now += wait_s

    def _job(self, start: str) -> str:
        """Run one job. Return how the job ended."""
        costs, rates = self._costs, self._conditions.disturbances
        limit_s = self._conditions.time_limit_s
        self._kill_at = self._now + limit_s
        early_s = self._signals.uniform(0, SIGNAL_EARLY_S)
        self._warn_at = self._kill_at - costs.slurm.signal_lead_s - early_s
        self._preempt_at = self._now + seconds_to_event(rates.preemptions, self._faults)
        self._preempted = False
        spares, round_ = self._losses.of_spares(self._now, self._faults), 0
        if self._pool is not None:
            self._pool.job_started(self._now)
        self._events["jobs with slow hosts"] += self._speeds.new_job()
        cold = True
        while True:
            lost_s = seconds_to_event(rates.failures * costs.hosts, self._faults)
            self._lost_at = self._now + lost_s
            self._crash_at = self._now + seconds_to_event(rates.crashes * costs.hosts, self._faults)
            try:
                return self._incarnation(f"{start}.{round_}", cold=cold)
            except ReportedError as error:
                cause = error.failure.cause
            self._roll_back()
            if cause == KILLED:
                self._events["jobs killed before their commit"] += 1
                return "preempted" if self._preempted else KILLED
            self._lost_at = self._crash_at = math.inf
            cold = cause == Cause.LOST_HOST
            if not cold:
                continue
            first = self._faults.random() * costs.hosts < 1
            try:
                self._advance(self._losses.found_s(first=first), DETECTION)
            except ReportedError:
                return "preempted" if self._preempted else KILLED
            spares = [lost_at for lost_at in spares if lost_at > self._now]
            if first or not spares:
                return "lost"
            spares.pop()
            self._speeds.replace_host()
            round_ += 1

    # -- one incarnation ---------------------------------------------------------------------

    def _incarnation(self, job: str, *, cold: bool) -> str:
        config, evaluation = self._config, self._costs.evaluation
        limit = config.max_restarts_without_commit
        futile = futile_start(self._records, self._names, job, limit)
        if futile is not None:
            self._futile = f"the trial would fail: {futile['reason']}"
            return "failed"
        base = self._committed
        self._incarnations += 1
        self._of_step = dict.fromkeys(PARTS, 0.0)
        self._record(Kind.BEGIN, {"job": job, "base": base and _directory(base.step)})
        self._step = 0 if base is None else base.step
        self._commit_times = frequency(config.checkpoint, self._now)
        self._evaluation_times = None if evaluation is None else frequency(evaluation, self._now)
        if base is not None:
            self._commit_times.restore(dict(base.commits))
            if self._evaluation_times is not None:
                self._evaluation_times.restore(dict(base.evaluations))
        self._advance(self._costs.start_s if cold else self._costs.restart_s, START)
        if self._pool is not None:
            record = None if base is None else base.ledger
            number = self._incarnations
            self._pool.master_started(self._now, number, self._step, self._records, record)
            self._pool.published(self._now, self._step)
        if base is None and evaluation is not None and evaluation.at_start:
            self._advance(self._costs.evaluation_s, EVALUATION)
        while not self._warned and self._step < self._costs.steps:
            self._train()
        self._commit_last()
        if self._step >= self._costs.steps:
            return "finished"
        self._warn()
        return "preempted" if self._preempted else "warned"

    @property
    def _warned(self) -> bool:
        return self._preempted or self._now >= self._warn_at

    def _train(self) -> None:
        step = self._step + 1
        self._of_step = dict.fromkeys(PARTS, 0.0)
        if self._pool is not None and not self._groups(self._pool, step):
            return
        self._advance(self._seconds(), TRAINING)
        self._step = step
        if self._pool is not None:
            pool = self._pool
            pool.advance(self._now)
            pool.ledger.train(self._items, step)
            pool.step_done(self._now, step)
            if step % pool.costs.publish.every_steps == 0:
                self._advance(max(pool.publishing_until - self._now, 0.0), WEIGHTS)
                pool.published(self._now, step)
        if self._evaluation_due(step):
            self._advance(self._costs.evaluation_s, EVALUATION)
        self._uncommitted.append((step, self._of_step))
        self._of_step = dict.fromkeys(PARTS, 0.0)
        if self._commit_times.check(step, 0, self._now):
            self._checkpoint(asynchronous=self._costs.checkpoint.asynchronous)

    _items: tuple[int, ...] = ()

    def _groups(self, pool: TaskPool, step: int) -> bool:
        """Wait for the groups of a step. Return False if a warning comes first."""
        began = self._now
        while True:
            samples = pool.take(self._now, step)
            if samples:
                self._items = tuple(one.item for one in samples)
                return True
            if self._warned:
                return False
            until = min(pool.next_event, self._warn_at, self._preempt_at)
            if until == math.inf or self._now - began > LONGEST_WAIT_S:
                raise UsageError("the rollout tasks never make enough groups for a step")
            self._advance(until - self._now, WAITING)

    def _seconds(self) -> float:
        """Return the seconds of a step, with a random longest completion and slowest host."""
        costs = self._costs
        seconds = costs.step_s
        if costs.longest is not None:
            longest = costs.longest.sample(self._lengths)
            seconds += costs.decoding_s * (longest / costs.longest.mean - 1)
        return seconds * self._speeds.factor()

    def _evaluation_due(self, step: int) -> bool:
        evaluation = self._costs.evaluation
        if evaluation is None or self._evaluation_times is None:
            return False
        due = self._evaluation_times.check(step, 0, self._now)
        return due or (step >= self._costs.steps and evaluation.at_end)

    # -- commits -----------------------------------------------------------------------------

    def _checkpoint(self, *, asynchronous: bool) -> None:
        self._finish_writing()
        record = None if self._pool is None else self._pool.record()
        costs, times = self._costs, self._evaluation_times
        written = _Written(
            self._step,
            math.inf,
            self._commit_times.state(),
            {} if times is None else times.state(),
            record,
        )
        if asynchronous:
            self._advance(costs.stall_s, COMMIT)
            written.ready_at = self._now + max(costs.write_s - costs.stall_s, 0.0)
            self._writing = written
        else:
            written.ready_at = self._now + costs.write_s
            self._writing = written
            self._finish_writing()

    def _finish_writing(self) -> None:
        """Wait until the ranks have written the current checkpoint, and commit it."""
        if self._writing is not None:
            self._advance(max(self._writing.ready_at - self._now, 0.0), COMMIT)
            self._poll()

    def _commit_last(self) -> None:
        self._finish_writing()
        if (0 if self._committed is None else self._committed.step) != self._step:
            self._checkpoint(asynchronous=False)

    def _poll(self) -> None:
        """Commit the current checkpoint if the ranks have written it."""
        written = self._writing
        if written is None or written.ready_at > self._now:
            return
        self._writing, self._committed = None, written
        self._commits_since_extension += 1
        self._record(Kind.COMMIT, {"step": written.step, "directory": _directory(written.step)})
        while self._uncommitted and self._uncommitted[0][0] <= written.step:
            self._uncommitted.popleft()
        if self._pool is not None:
            self._pool.committed()

    def _roll_back(self) -> None:
        """Count the work since the last commit as repeated, because the incarnation failed."""
        self._poll()
        self._writing = None
        if self._pool is not None:
            self._pool.advance(self._now)
            self._pool.master_ended()
        for parts in (*(parts for _, parts in self._uncommitted), self._of_step):
            for part, seconds in parts.items():
                self._parts[part] -= seconds
                self._parts[REPEATED] += seconds
        self._uncommitted.clear()
        self._of_step = dict.fromkeys(PARTS, 0.0)

    def _record(self, kind: Kind, data: dict[str, Any]) -> None:
        number = len(self._records)
        self._records.append(Record(number, kind, self._incarnations, self._now, data))

    # -- the clock ---------------------------------------------------------------------------

    def _advance(self, seconds: float, part: str) -> None:
        """Advance the clock for one part. Raises ReportedError if the incarnation ends first."""
        until = self._now + seconds
        if not self._preempted and self._preempt_at <= until:
            self._preempted = True
            self._events["preemptions"] += 1
            grace_s = self._conditions.disturbances.grace_s
            self._kill_at = min(self._kill_at, self._preempt_at + grace_s)
        stop = min(self._lost_at, self._crash_at, self._kill_at)
        ends = min(until, stop)
        self._parts[part] += ends - self._now
        if part in (TRAINING, EVALUATION, WAITING, WEIGHTS):
            self._of_step[part] += ends - self._now
        self._now = max(ends, self._now)
        if stop < until:
            self._interrupt(stop)
        if self._writing is not None:
            self._poll()

    def _interrupt(self, stop: float) -> None:
        host = f"h{self._incarnations}"
        if stop == self._lost_at:
            self._events["lost hosts"] += 1
            failure = Failure(cause=Cause.LOST_HOST, reason="a host was lost", host=host)
        elif stop == self._crash_at:
            self._events["crashes"] += 1
            failure = Failure(cause=Cause.DIED, reason="a process ended", host=host)
        else:
            self._warn()
            raise ReportedError(Failure(cause=KILLED))
        self._names.report(keys.failure(self._incarnations), failure)
        raise ReportedError(failure)

    def _warn(self) -> None:
        cause = "preemption" if self._preempted else TIME_LIMIT
        self._names.report(keys.warned(self._incarnations), Warned(cause=cause))


def _directory(step: int) -> str:
    return f"step{step}"
