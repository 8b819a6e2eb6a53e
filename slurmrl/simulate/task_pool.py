"""Rollout tasks on a simulated clock: their jobs, their groups, and the master's leases.

The master's real code keeps the ledger and the leases (`data.leases`,
`workers.master.task_leases`). A task generates all of its groups at once. The more groups a task
has, the longer it takes per token of each group.

In large trials, a simulated task represents several tasks, and an item represents several groups.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from slurmrl.backoff import Backoff
from slurmrl.config.schema.cluster import time_limit_s
from slurmrl.data.leases import Admission, SampleLedger
from slurmrl.data.ledger import LedgerRecord, StoredGroup
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.run.history.slots import Record
from slurmrl.run.history.state import Lineage
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Identity
from slurmrl.simulate.queue_waits import Waits
from slurmrl.simulate.simulated_task import SilentEvents, SimulatedAttempt, SimulatedTask
from slurmrl.simulate.trial_costs import SIGNAL_EARLY_S, Disturbances, TaskCosts, seconds_to_event
from slurmrl.tensors.weights.format import VersionId
from slurmrl.workers.master.task_attempts import AttemptRecord, RolloutAttempt
from slurmrl.workers.master.task_leases import SampleCounts, TaskLeases
from slurmrl.workers.polling import BEAT, LOOK

LAST_S: Final = 10.0
"""Seconds before the time limit of a task's job at which the task returns unfinished groups."""
PREEMPTED_S: Final = 20.0
"""Seconds for which a preempted task continues to generate."""
TURN_S: Final = 0.1
"""Seconds until the master reacts to an event."""
MOST_ITEMS: Final = 1024
"""Maximum number of simulated items per step. In larger batches, an item represents several
groups."""


class TaskPool:
    """All rollout tasks of a trial, and the ledger of the newest master."""

    def __init__(
        self,
        costs: TaskCosts,
        batch_size: int,
        disturbances: Disturbances,
        waits: Waits,
        *,
        lease_ttl_s: float,
        look_s: float,
        seed: str,
    ) -> None:
        """``look_s`` is the interval at which the master reads results."""
        self.costs = costs
        self.gpu_s = 0.0
        """GPU seconds of the jobs that have ended."""
        self.operations = 0
        """File operations of the simulated tasks for requests, results and weights."""
        self._batch_size = min(batch_size, MOST_ITEMS)
        self._groups = batch_size / self._batch_size
        """Number of groups per simulated item."""
        simulated = max(1, round(costs.count / self._groups))
        self._stands_for = costs.count / simulated
        """Number of tasks per simulated task."""
        self._per_host = max(1, round(costs.per_host / self._stands_for))
        self._disturbances = disturbances
        self._waits = waits
        self._ttl_s, self._look_s = lease_ttl_s, look_s
        self._rng = random.Random(f"{seed} tasks")
        self._lengths = random.Random(f"{seed} lengths")
        self._signals = random.Random(f"{seed} signals of tasks")
        self._now = 0.0
        self._events: list[tuple[float, int, str, int, int]] = []
        """Heap of (time, order, kind, task, attempt or `SimulatedTask.plan`)."""
        self._order = itertools.count()
        self._tasks = [SimulatedTask(number) for number in range(simulated)]
        self._held: set[int] = set(range(simulated))
        """Tasks without a job, which start when the trainers' job runs."""
        self._master = False
        self._enough = False
        self._next_look = math.inf
        self._read_at = 0.0
        """Time at which the master reads results again."""
        self._incarnation = 0
        self._living: dict[str, RolloutAttempt] = {}
        self._results: list[tuple[str, str, StoredGroup]] = []
        """Attempt, lease and sample of each group that no master has read yet."""
        self._read: list[tuple[str, StoredGroup]] = []
        """Lease and sample of each result that the master has read since the last commit."""
        self._snapshot = 0
        """Number of the results in `_read` that the next commit will contain."""
        self._versions: list[tuple[str, float]] = []
        """The newest weight versions, each with the time from which tasks can read it."""
        self._orphaned_at = math.inf
        self.ledger = SampleLedger(1, Lineage({1: None}))
        self._leases = self._make_leases(Lineage({1: None}))
        self.limit_s = math.inf if costs.slurm.time is None else time_limit_s(costs.slurm.time)
        if not costs.inside:  # Tasks in the trainers' job are lost only with the trainers' hosts.
            for first in range(0, simulated, self._per_host):
                self._plan_loss(first)

    def _make_leases(self, lineage: Lineage) -> TaskLeases:
        tasks = self.costs.settings
        most = tasks.max_in_flight
        self._admission = Admission(
            max_staleness=tasks.max_staleness,
            batch_size=self._batch_size,
            max_leased=None if most is None else max(1, round(most / self._groups)),
        )
        leases = TaskLeases(
            self.ledger,
            lineage,
            self._admission,
            self._living,
            SampleCounts(self.ledger),
            SilentEvents(),
            clock=lambda: self._now,
        )
        leases.rows = _rows
        return leases

    # -- the trainers ------------------------------------------------------------------------

    def job_started(self, now: float) -> None:
        """Start the tasks in the trainers' job, which begins now. Queue the jobs of other tasks."""
        self.advance(now)
        self._orphaned_at = math.inf
        for number in sorted(self._held):
            wait_s = 0.0 if self.costs.inside else self._waits.sample(self._rng)
            self._push(now + wait_s, "begin", number, 0)
        self._held.clear()

    def job_ended(self, now: float) -> None:
        """End the tasks in the trainers' job, which ends now; other tasks become orphans later."""
        self.advance(now)
        self.master_ended()
        if not self.costs.inside:
            self._orphaned_at = now + self.costs.settings.orphan_s
            self._push(self._orphaned_at, "orphans", 0, 0)
        else:
            self._end_all()

    def master_started(
        self,
        now: float,
        incarnation: int,
        step: int,
        records: Iterable[Record],
        record: LedgerRecord | None,
    ) -> None:
        """Start a master with the last commit's ledger. The master reads later results again."""
        self.advance(now)
        lineage = Lineage.of(records)
        self._incarnation = incarnation
        self.ledger = SampleLedger(incarnation, lineage, record)
        self._living = {}
        for task in self._tasks:
            if task.serves:
                self._join(task)
        for lease, sample in self._read:
            self.ledger.finish(lease, sample)
        self._master = True
        self._take_results()
        for holder in self.ledger.holders:
            if holder not in self._living:
                self.ledger.lose(holder)
        self._leases = self._make_leases(lineage)
        self._leases.step = step
        self._enough = False
        self._wake()

    def master_ended(self) -> None:
        self._master = False
        self._next_look = math.inf

    def published(self, now: float, step: int) -> None:
        """Publish the weights of a step. Tasks load the weights later."""
        self.advance(now)
        version, at = VersionId(step, self._incarnation).name, now + self.costs.publish_s
        self._versions = [*self._versions[-1:], (version, at)]
        for task in self._tasks:
            if task.serves:
                self._push(at + self.costs.load_s, "holds", task.number, task.attempt)

    @property
    def publishing_until(self) -> float:
        """Time from which tasks can read the newest weight version."""
        return self._versions[-1][1] if self._versions else 0.0

    def step_done(self, now: float, step: int) -> None:
        """Tell the master that a step was trained."""
        self.advance(now)
        self._leases.step = step
        self._wake()

    def take(self, now: float, step: int) -> Sequence[StoredGroup]:
        """Take the groups of a step. Take none if too few are finished."""
        self.advance(now)
        return self.ledger.take_finished(self._batch_size, step, self._admission.max_staleness)

    def record(self) -> LedgerRecord:
        """Return the state of the ledger for a checkpoint."""
        self._snapshot = len(self._read)
        return self.ledger.record()

    def committed(self) -> None:
        """Forget the results that the last `record` contains, because it is committed."""
        del self._read[: self._snapshot]
        self._snapshot = 0

    @property
    def next_event(self) -> float:
        """Time of the next event; infinite without events."""
        events = self._events[0][0] if self._events else math.inf
        return min(events, self._next_look)

    @property
    def all_operations(self) -> float:
        """File operations of all tasks for requests, results and weights."""
        return self.operations * self._stands_for

    @property
    def dropped(self) -> dict[str, int]:
        """Numbers of dropped groups by reason."""
        return {why: round(count * self._groups) for why, count in self.ledger.dropped.items()}

    @property
    def serving(self) -> int:
        """Number of tasks that have joined."""
        return round(sum(task.serves for task in self._tasks) * self._stands_for)

    def finish(self, now: float) -> None:
        """End all tasks at the end of the trial."""
        self.advance(now)
        self.master_ended()
        self._end_all()

    # -- the clock ---------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Handle all events until ``now``."""
        while (at := self.next_event) <= now:
            self._now = at
            if self._next_look <= at:
                self._look()
                continue
            _, _, kind, number, key = heapq.heappop(self._events)
            self._happen(kind, self._tasks[number], key)
        self._now = max(now, self._now)

    def _push(self, at: float, kind: str, number: int, key: int) -> None:
        if at < math.inf:
            heapq.heappush(self._events, (at, next(self._order), kind, number, key))

    def _happen(self, kind: str, task: SimulatedTask, key: int) -> None:
        if kind == "begin":
            self._begin(task)
        elif kind == "orphans":
            if self._orphaned_at <= self._now:  # The trainers have not returned.
                self._end_all()
        elif kind == "host":
            self._lose_host(task.number)
        elif kind == "lost":
            self._lose(f"{ROLLOUTS}.{task.number}.{key}")
        elif kind == "group":
            if key == task.plan and task.serves:
                self._finish_group(task)
        elif key == task.attempt and task.runs:
            self._happen_in_job(kind, task)

    def _happen_in_job(self, kind: str, task: SimulatedTask) -> None:
        if kind == "joined":
            task.serves = True
            if (version := self._readable()) is not None:
                task.versions = [version]
            if self.publishing_until > self._now:
                at = self.publishing_until + self.costs.load_s
                self._push(at, "holds", task.number, task.attempt)
            self._join(task)
            self._wake()
        elif kind == "holds":
            self._hold(task)
        elif kind == "warned":
            self._warn(task)
        elif kind == "preempted":
            self._warn(task)
            self._push(self._now + PREEMPTED_S, "retired", task.number, task.attempt)
        elif kind == "retired":
            self._retire(task)

    # -- hosts of tasks ----------------------------------------------------------------------

    def _plan_loss(self, first: int) -> None:
        """Plan the next loss of the host whose first task is ``first``."""
        lost_s = seconds_to_event(self._disturbances.failures, self._rng)
        self._push(self._now + lost_s, "host", first, 0)

    def _lose_host(self, first: int) -> None:
        """End all tasks of a host. The next jobs start after Slurm has detected the loss."""
        for task in self._tasks[first : first + self._per_host]:
            if task.runs:
                self._push(self._now + self._ttl_s, "lost", task.number, task.attempt)
                self._end(task, lost=True)
        self._plan_loss(first)

    # -- one task ----------------------------------------------------------------------------

    def _begin(self, task: SimulatedTask) -> None:
        if self._orphaned_at < math.inf:
            self._held.add(task.number)  # Queued tasks do not start without trainers.
            return
        task.begin(self._now)
        place = task.number, task.attempt
        self._push(self._now + self.costs.start_s, "joined", *place)
        each = self._disturbances
        if self.costs.inside:
            return
        self._push(self._now + seconds_to_event(each.preemptions, self._rng), "preempted", *place)
        lead_s = self.costs.slurm.signal_lead_s + self._signals.uniform(0, SIGNAL_EARLY_S)
        self._push(self._now + max(self.limit_s - lead_s, 0.0), "warned", *place)
        self._push(self._now + max(self.limit_s - LAST_S, 0.0), "retired", *place)

    def _join(self, task: SimulatedTask) -> None:
        agent = Identity(
            group=ROLLOUTS,
            task=task.number,
            attempt=task.attempt,
            host=f"host{task.number}",
            job="",
            job_id=str(task.number),
        )
        version = task.versions[-1] if task.versions else None
        record = AttemptRecord(name=task.name, agent=agent, version=version)
        attempt = SimulatedAttempt(
            _NOWHERE, self._incarnation, record, Backoff(1.0, 1.0), self._now, self._now
        )
        attempt.is_read, attempt.leaving = True, task.leaving
        self._living[task.name] = attempt

    def _hold(self, task: SimulatedTask) -> None:
        version = self._readable()
        if not task.serves or version is None or task.versions[-1:] == [version]:
            return
        task.versions.append(version)
        self.operations += LOOK
        if (attempt := self._living.get(task.name)) is not None:
            attempt.record = replace(attempt.record, version=version)
            self._leases.note(attempt, version)
            self._wake()

    def _readable(self) -> str | None:
        """Return the newest weight version that can be read."""
        return next((name for name, at in reversed(self._versions) if at <= self._now), None)

    def _warn(self, task: SimulatedTask) -> None:
        task.leaving = True
        if (attempt := self._living.get(task.name)) is not None:
            attempt.leaving = True
        if not task.items:
            self._retire(task)

    def _retire(self, task: SimulatedTask) -> None:
        """Return the unfinished groups to the master and end the job."""
        for item, (lease, _) in list(task.items.items()):
            self.ledger.return_items(lease, [item])
        self._end(task)
        self._wake()

    def _end(self, task: SimulatedTask, *, requeue: bool = True, lost: bool = False) -> None:
        """End the job of a task. With ``lost``, the master detects the end only later."""
        self.gpu_s += (self._now - task.since) * self.costs.gpus * self._stands_for
        task.end()
        if not lost:
            self._lose(task.name)
        if requeue:
            wait_s = 0.0 if self.costs.inside else self._waits.sample(self._rng)
            found_s = self._disturbances.slurmd_timeout_s if lost else 0.0
            self._push(self._now + found_s + wait_s, "begin", task.number, 0)

    def _lose(self, name: str) -> None:
        """Let the master queue the unfinished items of an attempt again."""
        self._take_results()
        if self._living.pop(name, None) is not None:
            self.ledger.lose(name)
            self._wake()

    def _end_all(self) -> None:
        """End the jobs of all tasks. New jobs start only with the trainers' next job."""
        for task in self._tasks:
            if task.runs:
                self._end(task, requeue=False)
                self._held.add(task.number)

    # -- groups ------------------------------------------------------------------------------

    def _token_s(self, task: SimulatedTask) -> float:
        """Return the seconds in which each group of a task gets one more token."""
        return self.costs.token_s(len(task.items) * self._groups / self._stands_for)

    def _plan(self, task: SimulatedTask) -> None:
        """Plan the event for the task's next finished group, in place of the earlier plan."""
        task.plan += 1
        if (left := task.first_end()) is not None:
            at = self._now + left * self._token_s(task)
            self._push(at, "group", task.number, task.plan)

    def _finish_group(self, task: SimulatedTask) -> None:
        task.move(self._now, self._token_s(task))
        sample = task.finish(interruptible=self.costs.settings.interruptible)
        self._results.append((task.name, sample.lease, sample))
        self._plan(task)
        if task.leaving and not task.items:
            self._retire(task)
        if self._master:
            self._next_look = min(self._next_look, max(self._read_at, self._now + TURN_S))

    def _execute(self, task: SimulatedTask, attempt: SimulatedAttempt) -> None:
        """Let a task read and execute its requests."""
        if not attempt.requests:
            return
        requests, attempt.requests = attempt.requests, []
        self.operations += BEAT + LOOK
        task.move(self._now, self._token_s(task))
        for request in requests:
            task.execute(request, self._length, self._order)
        self._plan(task)

    def _length(self) -> float:
        return self.costs.longest.sample(self._lengths)

    # -- the master --------------------------------------------------------------------------

    def _wake(self) -> None:
        """Let the master grant and take back leases soon."""
        if self._master:
            self._next_look = min(self._next_look, self._now + TURN_S)

    def _take_results(self) -> None:
        if not self._master:
            return
        self.operations += BEAT * len({name for name, _, _ in self._results})
        for _, lease, sample in self._results:
            self.ledger.finish(lease, sample)
            self._read.append((lease, sample))
        self._results = []

    def _look(self) -> None:
        self._next_look = math.inf
        if self._now >= self._read_at:
            self._take_results()
            self._read_at = self._now + self._look_s
        elif self._results:
            self._next_look = self._read_at
        self._leases.take_back()
        self._leases.confirm()
        self._enough = self._enough or self.serving >= self.costs.settings.min
        if self._enough:
            self._leases.grant()
        for task in self._tasks:
            attempt = self._living.get(task.name) if task.serves else None
            if isinstance(attempt, SimulatedAttempt):
                self._execute(task, attempt)


def _rows(items: Iterable[int]) -> Sequence[tuple[int, int]]:
    return [(0, item) for item in items]


_NOWHERE: Final = RunPaths(Path("/nonexistent/user/experiment/trial"))
"""Directory of simulated attempts, which read and write no files."""
