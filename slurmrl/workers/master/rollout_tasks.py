"""The rollout tasks of a trial: the master leases items to them and takes what they have finished.

Tasks come and go as they like and outlive the incarnations of the trainers. None of it delays or
ends an incarnation, except that a step waits until enough groups are finished. See "Leases of
samples" and "Samples of rollout tasks" in docs/protocols.md.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final

from slurmrl import log
from slurmrl.backoff import Backoff, Interval
from slurmrl.data.leases import STALE, Admission, SampleLedger, oldest_step
from slurmrl.data.ledger import ItemSample, LeasedItems, LedgerRecord
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.fsio import atomic
from slurmrl.history.lineage import Lineage
from slurmrl.monitor.events import EventWriter
from slurmrl.monitor.reports import Identity
from slurmrl.monitor.rollouts import RolloutsView, RolloutTaskView
from slurmrl.paths import RunPaths
from slurmrl.plan.metrics import ROLLOUT_SUMS, STALENESS_MAX, STALENESS_MEAN
from slurmrl.weights.version import VersionId
from slurmrl.workers.master.sample_checks import SampleChecks
from slurmrl.workers.master.sample_sweep import SampleSweep
from slurmrl.workers.master.task_attempts import (
    AttemptRecord,
    RolloutAttempt,
    RolloutsRecord,
    is_name,
    parse_name,
)
from slurmrl.workers.rollout_messages import (
    Abort,
    Confirm,
    GaveBack,
    GenerateItems,
    GroupsFinished,
    Joined,
    Leave,
    Leaving,
    RequestedItem,
    RolloutResult,
)

logger = log.get(__name__)

FIRST_POLL_S = 0.05
POLL_GROWTH = 1.1
"""News is late by at most a tenth of the time waited for it."""

JOINED: Final = "joined"
LEFT: Final = "left"
LOST: Final = "lost"


class RolloutTasks:
    """Call `look` often, and `start` once the dataset is known: nothing is leased before."""

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
        wanted: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``ledger`` and ``record`` are of the same commit. New attempts are looked for every
        ``look_s``, which is also the longest pause between two reads of the result logs.
        ``wanted``: tasks that may run at a time."""
        self.agents: dict[str, Identity] = {}
        """Of the newest attempt that has joined at each task, while it lives, by its label."""
        self._paths = paths
        self._ledger = ledger
        self._lineage = lineage
        self._admission = admission
        self._incarnation = incarnation
        self._events = events
        self._wanted_tasks = wanted
        self._clock = clock
        self._looks = Interval(look_s, clock)
        self._polls = Backoff(min(FIRST_POLL_S, look_s), look_s, growth=POLL_GROWTH)
        self._next_poll_at = clock()
        self._rows: Callable[[Iterable[int]], Sequence[tuple[int, int]]] | None = None
        self._step = 0
        """The last one that was trained."""
        self._wanted = 0
        """Groups that a step waits for."""
        self._attempts: dict[str, RolloutAttempt] = {}
        """By name; also those that are over, as long as they have a directory."""
        self._sweep = SampleSweep(paths)
        self._checks = SampleChecks(paths, clock)
        self._checks.add(ledger.finished)
        self._snapshot: tuple[RolloutsRecord, LedgerRecord] | None = None
        """What the checkpoint holds that is being written."""
        self._ages: Counter[int] = Counter()
        """Groups that steps have taken, by staleness."""
        self._counts: Counter[str] = Counter()
        """``damaged``, ``aborted``, ``given_back`` and ``lost`` items."""
        self._told = Counter({f"rollout/dropped_{STALE}": ledger.dropped.get(STALE, 0)})
        """The sums that the last metrics included."""
        self._taken: list[int] = []
        """Staleness of the groups taken since then."""
        for one in (record or RolloutsRecord()).attempts:
            attempt = self._add(one)
            if one.agent is not None and not attempt.over:
                self._join(one.agent)
        for holder in ledger.holders:
            if holder not in self._attempts or self._attempts[holder].over:
                ledger.lose(holder)

    # -- from the run ------------------------------------------------------------------------

    def start(self, rows: Callable[[Iterable[int]], Sequence[tuple[int, int]]]) -> None:
        """``rows`` gives (epoch, index) of each item."""
        self._rows = rows

    def look(self, dead: Collection[str], step: int) -> None:
        """When due, look for attempts, read what they say, and ask them for more.

        ``dead`` names the agents whose leases have expired, ``step`` is the last one trained.
        """
        self._step = step
        if self._looks.due():
            self._find()
        news = False
        if self._clock() >= self._next_poll_at:
            news = self._read()
            if news:
                self._polls.reset()
            self._next_poll_at = self._clock() + self._polls.next_s()
        self._end_those(dead)
        for sample, reason in self._checks.look():
            self._redo(sample, reason)
        if self._rows is not None:
            self._take_back()
            self._confirm()
            self._grant()
        for attempt in self._living():
            attempt.send()
        self._sweep.look()

    def take(self, step: int, count: int) -> Sequence[ItemSample] | None:
        """Take the groups of a step, all of which could be read; they are in flight then. None:
        there are not enough yet."""
        samples = self._ledger.take_finished(
            count, step, self._admission.max_staleness, sound=self._checks.sound
        )
        if len(samples) < count:
            self._wanted = count
            return None
        self._wanted = 0
        self._checks.keep(self._ledger.finished)
        ages = [step - 1 - oldest_step(sample) for sample in samples]
        self._ages.update(ages)
        self._taken += ages
        return samples

    def leave(self, name: str, within_s: float) -> None:
        """Ask an attempt to finish or give back what it holds, and to end. `start` comes first."""
        attempt = self._attempts[name]
        if not attempt.leaving:
            attempt.leaving = True
            self._post(attempt, Leave(within_s=within_s))

    # -- commits -----------------------------------------------------------------------------

    def record(self) -> RolloutsRecord:
        """What a checkpoint holds, together with the ledger of now."""
        record = RolloutsRecord(attempts=tuple(one.record for one in self._attempts.values()))
        self._snapshot = record, self._ledger.record()
        return record

    def committed(self) -> None:
        """The last `record` is committed: remove, from now on, what it has no need of."""
        if self._snapshot is not None:
            self._sweep.plan(*self._snapshot)
            self._snapshot = None

    # -- reports -----------------------------------------------------------------------------

    def waits_for(self) -> str:
        """Why there are no groups for the next step."""
        agents = [one for one in self._living() if one.record.agent is not None]
        if not agents:
            return "for a rollout task"
        if not self._ledger.leased and not any(map(self._is_able, agents)):
            return "for a rollout task that holds usable weights"
        sound = sum(one in self._checks.sound for one in self._ledger.finished)
        return f"for groups of rollout tasks: {sound} of {self._wanted}"

    def metrics(self) -> dict[str, float]:
        """Of the steps taken since the last call."""
        sums = self._sums()
        found = {name: float(sums[name] - self._told[name]) for name in ROLLOUT_SUMS}
        self._told = sums
        if self._taken:
            found[STALENESS_MEAN] = sum(self._taken) / len(self._taken)
            found[STALENESS_MAX] = float(max(self._taken))
        self._taken = []
        return found

    def _sums(self) -> Counter[str]:
        refused = self._ledger.refused.items()
        sums = {f"refused_{why.replace(' ', '_')}": number for why, number in refused}
        sums |= {f"dropped_{STALE}": self._ledger.dropped.get(STALE, 0), **self._counts}
        return Counter({f"rollout/{name}": number for name, number in sums.items()})

    def view(self) -> RolloutsView:
        """What the status tells."""
        now, leased = self._clock(), self._leased()
        finished = Counter(self._step - oldest_step(one) for one in self._ledger.finished)
        return RolloutsView(
            wanted=self._wanted_tasks,
            waits_for=self.waits_for() if self._wanted else "",
            finished=_by_age(finished),
            trained=_by_age(self._ages),
            dropped=dict(self._ledger.dropped),
            refused=dict(self._ledger.refused),
            damaged=self._counts["damaged"],
            aborted=self._counts["aborted"],
            given_back=self._counts["given_back"],
            lost=self._counts["lost"],
            tasks=tuple(
                RolloutTaskView(
                    task=one.label,
                    attempt=one.number,
                    host=one.record.agent.host if one.record.agent is not None else "",
                    version=one.record.version or "",
                    leased=leased[one.name],
                    silent_s=now - one.heard_at,
                    counts=one.counts,
                    leaving=one.leaving,
                )
                for one in self._living()
            ),
        )

    # -- attempts ----------------------------------------------------------------------------

    def _living(self) -> list[RolloutAttempt]:
        return [one for one in self._attempts.values() if not one.over]

    def _add(self, record: AttemptRecord) -> RolloutAttempt:
        attempt = RolloutAttempt(self._paths, self._incarnation, record, self._clock())
        self._attempts[record.name] = attempt
        return attempt

    def _join(self, agent: Identity) -> None:
        known = self.agents.get(agent.label)
        if known is None or known.attempt < agent.attempt:
            self.agents[agent.label] = agent

    def _find(self) -> None:
        """List the attempts; forget those without a directory that never joined, or are over."""
        try:
            names = set(filter(is_name, atomic.list_names(self._paths.rollouts)))
        except FileNotFoundError:  # no task was started yet
            names = set()
        except EnvironmentFailure as error:
            logger.warning("cannot look for rollout tasks, will retry: %s", error)
            return
        for name in sorted(names - self._attempts.keys()):
            self._add(AttemptRecord(name=name))
        for attempt in list(self._attempts.values()):
            if attempt.name not in names and (attempt.over or attempt.record.agent is None):
                del self._attempts[attempt.name]

    def _read(self) -> bool:
        """Read the logs of all living attempts. Returns whether there were news."""
        news = False
        for attempt in self._living():
            try:
                for result in attempt.read():
                    news = True
                    attempt.heard_at = self._clock()
                    attempt.take(result)
                    self._take(attempt, result)
            except EnvironmentFailure as error:
                logger.warning("%s; will retry", error)
            except CorruptFileError as error:
                self._end(attempt, LOST, str(error))
        return news

    def _take(self, attempt: RolloutAttempt, result: RolloutResult) -> None:
        match result:
            case Joined():
                self._join(result.agent)
                self._tell(attempt, JOINED, host=result.agent.host)
            case GroupsFinished():
                for group in result.groups:
                    sample = group.sample(attempt.name)
                    if self._ledger.finish(group.lease, sample):
                        self._checks.add([sample])
            case GaveBack():
                returned = self._ledger.return_items(result.lease, result.items)
                self._counts["given_back"] += len(returned)
            case Leaving():
                self._end(attempt, LEFT, result.reason)

    def _redo(self, sample: ItemSample, reason: str) -> None:
        """Queue the item of a damaged sample again."""
        if not self._ledger.redo(sample):
            return  # it was dropped meanwhile
        self._counts["damaged"] += 1
        group, task, attempt = parse_name(sample.task)
        logger.warning("item %d is made again: %s", sample.item, reason)
        self._events.write(
            "samples_damaged",
            task=f"{group}/{task}",
            attempt=attempt,
            item=sample.item,
            file=sample.file,
            reason=reason,
        )

    def _end_those(self, dead: Collection[str]) -> None:
        for attempt in self._living():
            newest = self.agents.get(attempt.label)
            if newest is None or attempt.number > newest.attempt:
                continue  # it has not joined
            if attempt.number < newest.attempt:
                self._end(attempt, LOST, "its task was started again")
            elif attempt.label in dead:
                self._end(attempt, LOST, "its agent no longer renews its lease")

    def _end(self, attempt: RolloutAttempt, state: str, reason: str) -> None:
        """Nothing that the attempt does from now on counts."""
        if attempt.over:
            return
        attempt.record = replace(attempt.record, over=reason or state)
        agent = self.agents.get(attempt.label)
        if agent is not None and agent.attempt == attempt.number:
            del self.agents[attempt.label]
        lost = self._ledger.lose(attempt.name)
        self._counts["lost"] += len(lost)
        logger.info("%s %s, %d items are queued again: %s", attempt.name, state, len(lost), reason)
        self._tell(attempt, state, reason=reason, items=len(lost))
        if state == LOST:  # it may live, and hold GPUs
            self._post(attempt, Leave(within_s=0.0))
            attempt.send()

    def _tell(self, attempt: RolloutAttempt, state: str, **more: object) -> None:
        who = {"task": attempt.label, "attempt": attempt.number}
        self._events.write("rollout_task", state=state, **who, **more)

    # -- leases ------------------------------------------------------------------------------

    def _leased(self) -> Counter[str]:
        """How many items each attempt works on."""
        leased: Counter[str] = Counter()
        for lease in self._ledger.leases:
            leased[lease.holder] += len(lease.items)
        return leased

    def _is_of_use(self, version: VersionId) -> bool:
        """Whether a token of these weights could be trained with in the next step."""
        if not self._lineage.has(version.step, version.incarnation):
            return False
        return version.step >= self._step - self._admission.max_staleness

    def _is_able(self, attempt: RolloutAttempt) -> bool:
        """Whether an attempt may get leases."""
        version = attempt.version
        return attempt.confirmed and not attempt.leaving and version is not None and (
            self._is_of_use(version)
        )  # fmt: skip

    def _take_back(self) -> None:
        """Queue items again whose samples would be too stale for every step to come."""
        for lease in self._ledger.leases:
            if self._is_of_use(VersionId.parse(lease.oldest)):
                continue
            attempt = self._attempts[lease.holder]
            if not attempt.is_read:
                continue  # it may have finished them
            returned = self._ledger.return_items(lease.lease, lease.items)
            self._counts["aborted"] += len(returned)
            if attempt.confirmed:
                attempt.post(Abort(lease=lease.lease, items=lease.items))

    def _confirm(self) -> None:
        """Tell attempts which leases hold, once all that they had said before is known."""
        for attempt in self._living():
            if attempt.is_read and attempt.record.agent is not None and not attempt.confirmed:
                self._post(attempt)

    def _post(self, attempt: RolloutAttempt, *requests: Leave) -> None:
        """Post requests, of which the first of a log says which leases hold."""
        if not attempt.confirmed:
            attempt.confirmed = True
            held = (one for one in self._ledger.leases if one.holder == attempt.name)
            attempt.post(Confirm(leases=tuple(map(self._request, held))))
        attempt.post(*requests)

    def _grant(self) -> None:
        """Lease items to those who have the least to do, as far as their weights allow, and to none
        more than its share of the most that may be leased."""
        able = {one.name: one for one in self._living() if self._is_able(one)}
        if not able:
            return
        share = -(-self._admission.max_leased // len(able))
        rooms = {
            one.name: self._ledger.room(self._admission, version=one.version.step, step=self._step)
            for one in able.values()
            if one.version is not None
        }
        leased = self._leased()
        granted: Counter[str] = Counter()
        queue = [(leased[name], name) for name in rooms]
        heapq.heapify(queue)
        while queue:
            load, name = heapq.heappop(queue)
            if load < share and granted.total() < rooms[name]:
                granted[name] += 1
                heapq.heappush(queue, (load + 1, name))
        for name, count in sorted(granted.items()):
            oldest = able[name].record.version
            assert oldest is not None
            able[name].post(self._request(self._ledger.lease(count, name, oldest)))

    def _request(self, lease: LeasedItems) -> GenerateItems:
        assert self._rows is not None
        rows = zip(lease.items, self._rows(lease.items), strict=True)
        items = (
            RequestedItem(item=item, epoch=epoch, index=index) for item, (epoch, index) in rows
        )
        return GenerateItems(lease=lease.lease, items=tuple(items), oldest=lease.oldest)


def _by_age(counts: Counter[int]) -> dict[str, int]:
    return {str(age): number for age, number in sorted(counts.items())}
