"""The rollout tasks of a trial, in the master's process.

Invariant: according to the commits, each item is trained once or dropped for a recorded reason,
even if processes die.

- Only the master of the newest incarnation changes the ledger (`data.leases.SampleLedger`). A
  commit contains the ledger. For each result log, it also contains the position up to which the
  ledger includes the results. The next incarnation begins with this state, reads later results
  again and requests missing results again.
- Each item is leased to one attempt at a time (`TaskLeases`). A result counts only under the
  current lease of its item, so late and repeated results have no effect.
- The items of an attempt that is lost, leaves or cannot write are queued again.
- A step takes only samples that the master could read (`SampleChecks`). Samples remain on disk as
  long as a commit names them (`SampleSweep`).

Tasks may start and end at any time, and outlive the incarnations of the trainers. A step waits for
enough finished groups. If all tasks fail at their start in the same way, the trial fails
(`FailedTasks`). Otherwise tasks neither delay nor end an incarnation. See "Leases of samples" and
"Samples of rollout tasks" in docs/protocols.md.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from slurmrl import log
from slurmrl.backoff import Backoff, Interval
from slurmrl.data.leases import Admission, SampleLedger, oldest_step
from slurmrl.data.ledger import LedgerRecord, StoredGroup
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.fsio import atomic
from slurmrl.fsio.documents import MOST_COUNT
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.run.events import EventWriter
from slurmrl.run.history.state import Lineage
from slurmrl.run.lease import LeaseBoard
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Identity, RolloutsView
from slurmrl.scheduler.submission import wanted_tasks
from slurmrl.tensors.weights.format import VersionId
from slurmrl.workers.master.task_attempts import (
    LEFT,
    LOST,
    AttemptRecord,
    AttemptWakeups,
    FailedTasks,
    RolloutAttempt,
    RolloutsRecord,
    TaskEvents,
    is_name,
)
from slurmrl.workers.master.task_leases import (
    ItemRows,
    SampleChecks,
    SampleCounts,
    SampleSweep,
    StepWait,
    TaskLeases,
)
from slurmrl.workers.polling import SHORTEST_RESULTS_S
from slurmrl.workers.rollout_messages import (
    GaveBack,
    GroupsFinished,
    Holds,
    Joined,
    Leave,
    Leaving,
    RolloutResult,
    Unreadable,
)

logger = log.get(__name__)

LEAVE_S = 300.0
"""Seconds that a surplus task may take to finish its items."""
POLL_GROWTH = 1.1
"""Factor of growth of the pause between two reads of an idle attempt's log."""


class RolloutTasks:
    """The tasks of a trial. Call `look` often, and `start` once the order of items is known."""

    def __init__(
        self,
        paths: RunPaths,
        ledger: SampleLedger,
        lineage: Lineage,
        admission: Admission,
        incarnation: int,
        events: EventWriter,
        record: RolloutsRecord | None = None,
        *,
        look_s: float,
        lease_ttl_s: float,
        numbers: TaskNumbers | None = None,
        poll_s: float = SHORTEST_RESULTS_S,
        wakeups: AttemptWakeups | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with the ``ledger`` and ``record`` of one commit.

        The master looks for new attempts every ``look_s``. The master reads the log of an attempt
        with items every ``poll_s``, and other logs at least every ``look_s``. The status omits an
        attempt that has not joined if its agent has sent no heartbeat for ``lease_ttl_s``. By
        default, one task must join before items are leased, and all tasks may remain (``numbers``).
        """
        self.agents: dict[str, Identity] = {}
        """Newest attempt of each task that has joined and not ended, by the task's label."""
        self._begun_of: dict[str, int] = {}
        """Mapping from each task to the number of its newest attempt. Earlier attempts have ended,
        so their items are queued again even before the newest attempt joins."""
        self.unreadable: set[VersionId] = set()
        """Versions of this incarnation that a task cannot read; the caller empties this set."""
        self._paths = paths
        self._ledger = ledger
        self._admission = admission
        self._incarnation = incarnation
        self._events = TaskEvents(paths, events, lineage, incarnation)
        self._numbers = numbers or TaskNumbers(paths, clock=clock)
        self.wakeups = wakeups or AttemptWakeups()
        self._clock = clock
        self._looks = Interval(look_s, clock)
        self._starting = LeaseBoard(paths.leases, lease_ttl_s, look_s=look_s, clock=clock)
        """Leases of agents whose attempts have not joined."""
        self._pauses_s = min(poll_s, look_s), look_s
        self._wanted = 0
        """Number of groups that a step waits for; 0 if no step waits."""
        self._wait = StepWait(clock)
        self._attempts: dict[str, RolloutAttempt] = {}
        """Attempts by name. Ended attempts that still have a directory are included."""
        self._living: dict[str, RolloutAttempt] = {}
        """Mapping from name to attempt, for attempts that have not ended."""
        self._sweep = SampleSweep(paths)
        self._checks = SampleChecks(paths, clock)
        self._checks.add(ledger.finished)
        self._snapshot: tuple[RolloutsRecord, LedgerRecord] | None = None
        """Attempts and ledger in the checkpoint that the ranks are writing."""
        self._failed = FailedTasks(paths, inside=self._numbers.fixed)
        self._counts = SampleCounts(ledger)
        self._leases = TaskLeases(
            ledger,
            lineage,
            admission,
            self._living,
            self._counts,
            self._events,
            self.wakeups.address,
            clock,
        )
        for one in (record or RolloutsRecord()).attempts:
            attempt = self._add(one)
            if one.agent is not None and not attempt.over:
                self._join(one.agent)
        for holder in ledger.holders:
            if holder not in self._attempts or self._attempts[holder].over:
                ledger.lose(holder)

    # -- calls from the run ------------------------------------------------------------------

    def start(self, rows: ItemRows, stops: Sequence[int] = ()) -> None:
        """Begin to lease items. Tasks must end completions at the tokens ``stops``."""
        self._leases.rows, self._leases.stops = rows, tuple(stops)

    def look(self, dead: Collection[str], step: int) -> None:
        """When due, look for attempts, read their results, and lease items to them.

        ``dead`` are the labels of agents whose leases have expired. ``step`` is the last trained
        step. Raises ReportedError if no task can start.
        """
        self._leases.step = step
        if self._looks.due():
            self._find()
            self._numbers.look()
            self._failed.look(self._attempts.values(), self._lives)
            if self._wanted:
                self._failed.evaluate(self._living.values(), self._lives, self._numbers.allowed)
        self._read()
        self._end_those(dead)
        for sample, reason in self._checks.look():
            self._redo(sample, reason)
        if self._leases.rows is not None:
            self._leases.take_back()
            self._leases.confirm()
            for attempt in self._numbers.surplus(self._joined()):
                self.leave(attempt.name, LEAVE_S)
            if self._numbers.are_enough(len(self._joined())):
                self._leases.grant()
        self.wakeups.wake([one for one in self._living.values() if one.send()])
        self._sweep.look()

    def tell_weights(self) -> None:
        """Send wake-ups to the tasks after the publication of a version."""
        self.wakeups.wake(self._living.values())

    def take(
        self, step: int, count: int, *, filtered: bool = False
    ) -> Sequence[StoredGroup] | None:
        """Take ``count`` readable groups for a step; they are then in flight.

        If a filter follows (``filtered``), take more groups if available, so that it probably keeps
        ``count`` groups. Return None if there are too few groups, or if the step should wait.
        """
        self._wait.begin(step)
        samples: Sequence[StoredGroup] = ()
        if not filtered or not self._overtakes(step, count):
            samples = self._ledger.take_finished(
                count,
                step,
                self._admission.max_staleness,
                most=self._ledger.expected(count, self._admission) if filtered else None,
                sound=self._checks.sound,
            )
        if len(samples) < count:
            self._wanted = count
            return None
        self._wanted = 0
        self._checks.keep(self._ledger.finished)
        self._counts.take([step - 1 - oldest_step(sample) for sample in samples])
        return samples

    def _overtakes(self, step: int, count: int) -> bool:
        """Return whether the step should wait, because unfinished groups would become too stale.

        Otherwise training would lack many long completions, whose groups finish last.
        """
        if len(self._checks.sound) < count:
            return False
        holders = self._ledger.stragglers(step, self._admission.max_staleness)
        return bool(holders & self._leases.able().keys()) and self._wait.lasts()

    def returned(self, step: int, samples: Iterable[StoredGroup]) -> None:
        """Queue groups that a step has taken but not used, for the next step.

        First, the master reads them again. Tasks regenerate groups that would be too stale.
        """
        for sample in samples:
            age = step - 1 - oldest_step(sample)
            self._counts.give_back(age)
            if age < self._admission.max_staleness:
                self._checks.add([sample])
            else:
                self._ledger.redo(sample)

    def leave(self, name: str, within_s: float) -> None:
        """Tell an attempt to finish or return its items and exit. Call `start` first."""
        attempt = self._attempts[name]
        if not attempt.leaving:
            attempt.leaving = True
            self._leases.post(attempt, Leave(within_s=within_s))

    # -- commits -----------------------------------------------------------------------------

    def record(self) -> RolloutsRecord:
        """Return the state of the attempts for a checkpoint that also contains the ledger."""
        record = RolloutsRecord(attempts=tuple(one.record for one in self._attempts.values()))
        self._snapshot = record, self._ledger.record()
        return record

    def committed(self) -> None:
        """Plan to remove files that the last `record`, which is now committed, does not need."""
        if self._snapshot is not None:
            self._sweep.plan(*self._snapshot)
            self._snapshot = None

    # -- reports -----------------------------------------------------------------------------

    def waits_for(self) -> str:
        """Return the object for which the next step waits, as the end of a sentence."""
        agents = self._joined()
        if not agents:
            return "for a rollout task"
        if not self._numbers.are_enough(len(agents)):
            return f"for rollout tasks: {len(agents)} of at least {self._numbers.least}"
        if not self._ledger.leased and not self._leases.able():
            return "for a rollout task that holds usable weights"
        sound = sum(one in self._checks.sound for one in self._ledger.finished)
        if sound >= self._wanted:
            return "for unfinished groups that would be too stale for any later step"
        return f"for groups of rollout tasks: {sound} of {self._wanted}"

    @property
    def lack_weights(self) -> bool:
        """Whether tasks have joined, but none has weights that the next step could use."""
        joined = any(one.record.agent is not None for one in self._living.values())
        return joined and not self._leases.able()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the steps since the last call."""
        return self._counts.metrics()

    def view(self) -> RolloutsView:
        """Return the rollout tasks as `slurmrl status` shows them."""
        now = self._clock()
        finished = Counter(self._leases.step - oldest_step(one) for one in self._ledger.finished)
        return RolloutsView(
            wanted=self._numbers.allowed,
            waits_for=self.waits_for() if self._wanted else "",
            finished=_by_age(finished),
            trained=_by_age(self._counts.ages),
            dropped=dict(self._ledger.dropped),
            refused=dict(self._ledger.rejected),
            damaged=self._counts.items["damaged"],
            aborted=self._counts.items["aborted"],
            given_back=self._counts.items["given_back"],
            lost=self._counts.items["lost"],
            tasks=tuple(
                one.view(now, self._ledger.leased_by(one.name))
                for one in self._living.values()
                if self._lives(one)
            ),
        )

    # -- attempts ----------------------------------------------------------------------------

    def _lives(self, attempt: RolloutAttempt) -> bool:
        return attempt.record.agent is not None or self._starting.alive(attempt.name)

    def _joined(self) -> list[RolloutAttempt]:
        return [one for one in self._living.values() if one.record.agent is not None]

    def _add(self, record: AttemptRecord) -> RolloutAttempt:
        now, polls = self._clock(), Backoff(*self._pauses_s, growth=POLL_GROWTH)
        attempt = RolloutAttempt(self._paths, self._incarnation, record, polls, now, now)
        self._attempts[record.name] = attempt
        begun = self._begun_of.get(attempt.label, -1)
        self._begun_of[attempt.label] = max(attempt.number, begun)
        if not attempt.over:
            self._living[record.name] = attempt
        return attempt

    def _join(self, agent: Identity) -> None:
        known = self.agents.get(agent.label)
        if known is None or known.attempt < agent.attempt:
            self.agents[agent.label] = agent

    def _find(self) -> None:
        """Find new attempts. Forget attempts without a directory that ended or never joined."""
        try:
            names = set(filter(is_name, atomic.list_names(self._paths.rollouts)))
        except FileNotFoundError:  # No task has started so far.
            names = set()
        except EnvironmentFailure as error:
            logger.warning("cannot look for rollout tasks, will retry: %s", error)
            return
        for name in sorted(names - self._attempts.keys()):
            label = self._add(AttemptRecord(name=name)).label
            for one in self._living.values():
                if one.label == label:
                    one.read_at = self._clock()  # Read the last results of the earlier attempt now.
        for attempt in list(self._attempts.values()):
            if attempt.name not in names and (attempt.over or attempt.record.agent is None):
                del self._attempts[attempt.name]
                self._living.pop(attempt.name, None)

    def _read(self) -> None:
        """Read the due result logs of attempts that have not ended."""
        now = self._clock()
        self.wakeups.receive(self._living.values(), now)
        for attempt in [one for one in self._living.values() if one.read_at <= now]:
            try:
                for result in attempt.read():
                    attempt.heard_at = now
                    attempt.take(result)
                    self._take(attempt, result)
                attempt.listened(now, self._pauses_s[1])
            except EnvironmentFailure as error:
                attempt.silent_s = 0.0  # The directory, not the task, may be silent.
                logger.warning("%s; will retry", error)
            except CorruptFileError as error:
                self._end(attempt, LOST, str(error))
            if attempt.heard_at == now or self._ledger.leased_by(attempt.name):
                attempt.polls.reset()
            # Poll less often if wake-ups arrive, but keep polling: wake-ups can be lost.
            attempt.read_at = now + attempt.polls.next_s() * (2 if attempt.announces else 1)

    def _take(self, attempt: RolloutAttempt, result: RolloutResult) -> None:
        match result:
            case Joined():
                self._join(result.agent)
                self._events.joined(attempt, result.agent.host)
            case GroupsFinished():
                for group in result.groups:
                    sample = replace(group, task=attempt.name)
                    if self._ledger.finish(group.lease, sample):
                        self._checks.add([sample])
            case GaveBack():
                attempt.leaving = True  # This attempt must not get the items again.
                returned = self._ledger.return_items(result.lease, result.items)
                self._counts.items["given_back"] += len(returned)
            case Holds():
                self._leases.note(attempt, result.version)
            case Unreadable():
                self._reject(attempt, result)
            case Leaving():
                self._end(attempt, LEFT, result.reason)

    def _reject(self, attempt: RolloutAttempt, result: Unreadable) -> None:
        """Record a version that a task cannot read, if this incarnation has published it."""
        version = VersionId.parse(result.version)
        if version.incarnation != self._incarnation:
            return
        self.unreadable.add(version)
        self._events.unreadable(attempt, result.version, result.reason)

    def _redo(self, sample: StoredGroup, reason: str) -> None:
        """Queue the item of a damaged sample again."""
        if not self._ledger.redo(sample):
            return  # The item has been dropped.
        self._counts.items["damaged"] += 1
        self._events.damaged(sample, reason)

    def _end_those(self, dead: Collection[str]) -> None:
        for attempt in list(self._living.values()):
            agent = self.agents.get(attempt.label)
            if attempt.number < self._begun_of[attempt.label]:
                self._end(attempt, LOST, "its task was started again")
            elif attempt.label in dead and agent is not None and agent.attempt == attempt.number:
                self._end(attempt, LOST, "its agent no longer renews its lease")

    def _end(self, attempt: RolloutAttempt, state: str, reason: str) -> None:
        """End an attempt, and queue its items again. Its later results do not count."""
        if attempt.over:
            return
        attempt.record = replace(attempt.record, over=reason or state)
        del self._living[attempt.name]
        agent = self.agents.get(attempt.label)
        if agent is not None and agent.attempt == attempt.number:
            del self.agents[attempt.label]
        lost = self._ledger.lose(attempt.name)
        self._counts.items["lost"] += len(lost)
        logger.info("%s %s, %d items are queued again: %s", attempt.name, state, len(lost), reason)
        self._events.ended(attempt, state, reason, len(lost))
        if state == LOST:  # A lost attempt may still run and hold GPUs.
            self._leases.post(attempt, Leave(within_s=0.0))
            attempt.send()


def _by_age(counts: Counter[int]) -> dict[str, int]:
    return {str(age): number for age, number in sorted(counts.items())}


class TaskNumbers:
    """Decides how many tasks must join, and how many may remain."""

    def __init__(
        self,
        paths: RunPaths,
        *,
        planned: int = MOST_COUNT,
        fixed: bool = False,
        least: int = 1,
        patience_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Let ``planned`` tasks run at a time, or a user's number (`slurmrl scale`).

        With ``fixed``, users cannot set the number, because tasks run in the trainers' job. An
        incarnation leases items only after ``least`` tasks have joined. Tasks count as surplus only
        after ``patience_s`` seconds. In this time, the master detects lost tasks.
        """
        self.allowed = planned
        """Number of tasks that may run now."""
        self.least = least
        self._paths = paths
        self.fixed = fixed
        self._planned = planned
        self._patience_s = patience_s
        self._clock = clock
        self._too_many_since: float | None = None
        self._were_enough = False

    def look(self) -> None:
        """Read the number of tasks that a user may have set (``slurmrl scale``)."""
        if self.fixed:
            return
        try:
            self.allowed = wanted_tasks(self._paths, ROLLOUTS, self._planned)
        except (EnvironmentFailure, CorruptFileError) as error:
            logger.warning("cannot read the number of tasks, which is unchanged: %s", error)

    def are_enough(self, joined: int) -> bool:
        """Return whether enough tasks have ever joined in this incarnation."""
        self._were_enough = self._were_enough or joined >= self.least
        return self._were_enough

    def surplus(self, joined: Iterable[RolloutAttempt]) -> Sequence[RolloutAttempt]:
        """Return surplus attempts (the tasks with the highest numbers) after ``patience_s``."""
        staying = sorted(
            (one for one in joined if not one.leaving), key=lambda one: (one.task, one.number)
        )
        if len(staying) <= self.allowed:
            self._too_many_since = None
            return ()
        if self._too_many_since is None:
            self._too_many_since = self._clock()
        waited_s = self._clock() - self._too_many_since
        return staying[self.allowed :] if waited_s >= self._patience_s else ()
