"""Leases of items to attempts of rollout tasks, and the samples that the attempts make.

A lease gives items to an attempt. This module also takes items back, checks that the samples of a
step are readable, counts samples, and removes samples that no commit needs. See "Leases of samples"
in docs/protocols.md.
"""

from __future__ import annotations

import heapq
import itertools
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurmrl import log
from slurmrl.backoff import HIDDEN_PAUSES_S, OUTAGE_S, Backoff
from slurmrl.data.leases import STALE, Admission, SampleLedger
from slurmrl.data.ledger import LeasedItems, LedgerRecord, StoredGroup
from slurmrl.errors import EnvironmentFailure, SampleFileError
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.plan.metric_names import ROLLOUT_SUMS, STALENESS_MAX, STALENESS_MEAN
from slurmrl.rollouts.sample_files import read_once, remove_settled
from slurmrl.run.channel.wakeups import WakeupAddress
from slurmrl.run.history.state import Lineage
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.weights.format import VersionId
from slurmrl.workers.master.task_attempts import (
    AttemptRecord,
    RolloutAttempt,
    RolloutsRecord,
    TaskEvents,
    parse_name,
)
from slurmrl.workers.rollout_messages import COUNTS_S, Abort, Confirm, Leave

ItemRows = Callable[[Iterable[int]], Sequence[tuple[int, int]]]
"""Function that returns (epoch, index) of each item."""
LAG_S = 10.0
"""Seconds added to twice an attempt's last delay: for this time, an attempt that loads new weights
keeps a share of the items."""

SILENT_S = 6 * COUNTS_S
"""Seconds without a message after which an attempt that has not ended counts as unable to write.
Only time in which the master can read the result log counts."""

logger = log.get(__name__)
LOOK_S = 0.1
"""Seconds after which `SampleChecks.look` begins no more checks."""


class TaskLeases:
    """Leases the items of a ledger to attempts that have usable weights and have not ended."""

    def __init__(
        self,
        ledger: SampleLedger,
        lineage: Lineage,
        admission: Admission,
        living: Mapping[str, RolloutAttempt],
        counts: SampleCounts,
        events: TaskEvents,
        wakeups: WakeupAddress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``living`` are the attempts that have not ended; the caller keeps this up to date.

        ``wakeups`` is the master's address for wake-ups of the attempts.
        """
        self.step = 0
        """The last trained step; the caller keeps this up to date."""
        self.rows: ItemRows | None = None
        """The caller sets this before `grant`."""
        self.stops: tuple[int, ...] = ()
        """Ids of the tokens at which the trainers end completions."""
        self._ledger = ledger
        self._lineage = lineage
        self._admission = admission
        self._living = living
        self._counts = counts
        self._events = events
        self._wakeups = wakeups
        self._clock = clock
        self._newest: str | None = None
        """The newest version that any attempt has loaded."""
        self._newest_at = clock()

    # -- attempts that may have items --------------------------------------------------------

    def note(self, attempt: RolloutAttempt, version: str) -> None:
        """Record how many seconds later than the first attempt this attempt loaded a version."""
        now = self._clock()
        if self._newest is None or VersionId.parse(self._newest) < VersionId.parse(version):
            self._newest, self._newest_at = version, now
        if version == self._newest:
            attempt.lag_s = now - self._newest_at

    def able(self) -> dict[str, str]:
        """Return the names of attempts that may get leases, each with its weight version."""
        held = {
            one.name: one.record.version
            for one in self._living.values()
            if one.confirmed and not one.leaving and one.record.version is not None
        }
        of_use = self._of_use({*held.values()})
        return {name: version for name, version in held.items() if version in of_use}

    def _of_use(self, names: Collection[str]) -> dict[str, VersionId]:
        """Return, by name, the versions whose tokens the next step can train on."""
        versions = {name: VersionId.parse(name) for name in names}
        first = self.step - self._admission.max_staleness
        return {
            name: one
            for name, one in versions.items()
            if one.step >= first and self._lineage.has(one.step, one.incarnation)
        }

    def _expected(self) -> set[str]:
        """Return the attempts that will probably soon have the newest weights and need items."""
        since_s = self._clock() - self._newest_at
        return {
            one.name
            for one in self._living.values()
            if one.confirmed
            and not one.leaving
            and one.record.version not in (None, self._newest)
            and since_s < LAG_S + 2 * one.lag_s
        }

    def _silent(self) -> set[str]:
        """Return living attempts that cannot write, if other attempts can take their items."""
        silent = {one.name for one in self._living.values() if one.silent_s >= SILENT_S}
        return silent if self.able().keys() - silent else set()

    # -- leases ------------------------------------------------------------------------------

    def take_back(self) -> None:
        """Take back items that will not yield usable samples, and queue them again.

        Either their samples would be too stale for every later step, or their attempt cannot write.
        With `max_staleness: 0`, a step would wait for such items.
        """
        oldest, silent = self._ledger.oldest, self._silent()
        useless = oldest - self._of_use(oldest).keys()
        for lease in self._ledger.leases if useless or silent else ():
            attempt = self._living[lease.holder]
            too_old = lease.oldest in useless and attempt.is_read
            if not too_old and lease.holder not in silent:
                continue  # Unread results may contain these items.
            returned = self._ledger.return_items(lease.lease, lease.items)
            self._counts.items["aborted"] += len(returned)
            if attempt.confirmed:
                attempt.post(Abort(lease=lease.lease, items=lease.items))
            if lease.holder in silent:
                self._events.silent(attempt, len(returned))

    def confirm(self) -> None:
        """Tell attempts which leases are valid, as soon as all their earlier messages are read."""
        for attempt in self._living.values():
            if attempt.is_read and attempt.record.agent is not None and not attempt.confirmed:
                self.post(attempt)

    def post(self, attempt: RolloutAttempt, *requests: Leave) -> None:
        """Post requests to an attempt, and before its first requests the valid leases."""
        if not attempt.confirmed:
            attempt.confirmed = True
            held = self._ledger.leases_of(attempt.name)
            leases = tuple(map(self._request, held))
            attempt.post(Confirm(leases=leases, wakeups=self._wakeups, stop_token_ids=self.stops))
        attempt.post(*requests)

    def grant(self) -> None:
        """Lease items to attempts with usable weights, first to those with the fewest items.

        No attempt gets more than an equal share of the items that tasks may have now.
        """
        silent = self._silent()
        able = {name: held for name, held in self.able().items() if name not in silent}
        rooms = {
            name: self._ledger.room(self._admission, version=version.step, step=self.step)
            for name, version in self._of_use({*able.values()}).items()
        }
        room = max(rooms.values(), default=0)
        if not room:
            return
        sharers = len(able.keys() | self._expected() - silent)
        share = -(-(self._ledger.leased + room) // sharers)
        loads = {name: self._ledger.leased_by(name) for name in able}
        granted = dealt(loads, {name: rooms[version] for name, version in able.items()}, share)
        for name, count in sorted(granted.items()):
            lease = self._ledger.lease(count, name, able[name])
            self._living[name].post(self._request(lease))

    def _request(self, lease: LeasedItems) -> LeasedItems:
        assert self.rows is not None
        return replace(lease, rows=tuple(self.rows(lease.items)))


def dealt(loads: Mapping[str, int], rooms: Mapping[str, int], share: int) -> Counter[str]:
    """Return the number of new items for each task; each item goes to the least loaded task.

    ``loads`` are the items that tasks already have. No task gets more than ``share`` items,
    including its load. A task gets no more items once the new items of all tasks together reach the
    task's entry in ``rooms``.
    """
    queue = [(load, name) for name, load in loads.items()]
    heapq.heapify(queue)
    granted: Counter[str] = Counter()
    for number in range(max(rooms.values(), default=0)):
        while queue and (queue[0][0] >= share or number >= rooms[queue[0][1]]):
            heapq.heappop(queue)
        if not queue:
            break
        load, name = queue[0]
        granted[name] += 1
        heapq.heapreplace(queue, (load + 1, name))
    return granted


@dataclass(frozen=True, order=True)
class _Check:
    due: float
    number: int
    sample: StoredGroup = field(compare=False)
    failed: int = field(default=0, compare=False)
    """Number of earlier checks in which the sample looked damaged."""


class SampleChecks:
    """Reads each sample once to find samples that the trainers would reject as damaged."""

    def __init__(
        self, paths: RunPaths, clock: Callable[[], float], *, calls: SystemCalls = REAL
    ) -> None:
        self.sound: set[StoredGroup] = set()
        self._paths, self._clock, self._calls = paths, clock, calls
        self._due: list[_Check] = []
        """Scheduled checks, as a heap."""
        self._numbers = itertools.count()
        self._outage = Backoff(*OUTAGE_S)
        self._rests_until = clock()

    def add(self, samples: Iterable[StoredGroup]) -> None:
        for sample in samples:
            heapq.heappush(self._due, _Check(self._clock(), next(self._numbers), sample))

    def keep(self, samples: Iterable[StoredGroup]) -> None:
        """Keep the results and checks of these samples; forget all other samples."""
        wanted = set(samples)
        self.sound &= wanted
        self._due = [check for check in self._due if check.sample in wanted]
        heapq.heapify(self._due)

    def look(self) -> list[tuple[StoredGroup, str]]:
        """Check due samples for about `LOOK_S`. Return damaged samples with the reasons."""
        damaged = []
        now = self._clock()
        until = now + LOOK_S
        while self._due and self._rests_until <= now < until and self._due[0].due <= now:
            found = self._check(heapq.heappop(self._due), now)
            if found is not None:
                damaged.append(found)
            now = self._clock()
        return damaged

    def _check(self, check: _Check, now: float) -> tuple[StoredGroup, str] | None:
        """Read a sample; return it with the reason if it is damaged.

        A file server may show this host an old state for a while. Therefore a sample counts as
        damaged only if it still looks damaged after about a minute.
        """
        folder = self._paths.samples_of(check.sample.task)
        try:
            read_once(folder, check.sample, calls=self._calls)
        except SampleFileError as error:
            cached = self._calls.caches(self._paths.rollouts)  # not `folder`: it may be missing
            pauses_s = HIDDEN_PAUSES_S if cached else ()
            if check.failed >= len(pauses_s):
                return check.sample, str(error)
            due = now + pauses_s[check.failed]
            heapq.heappush(self._due, replace(check, due=due, failed=check.failed + 1))
        except EnvironmentFailure as error:
            self._rests_until = now + self._outage.next_s()
            heapq.heappush(self._due, replace(check, due=self._rests_until))
            logger.warning("cannot read samples, will retry: %s", error)
        else:
            self._outage.reset()
            self.sound.add(check.sample)
        return None


class SampleCounts:
    """Counts since the incarnation began, in addition to the ledger's counts."""

    def __init__(self, ledger: SampleLedger) -> None:
        self._ledger = ledger
        self.items: Counter[str] = Counter()
        """Number of ``damaged``, ``aborted``, ``given_back`` and ``lost`` items."""
        self.ages: Counter[int] = Counter()
        """Number of groups that steps have taken, by staleness."""
        self._told = Counter({f"rollout/dropped_{STALE}": ledger.dropped.get(STALE, 0)})
        """Values of the counters at the last call of `metrics`."""
        self._taken: list[int] = []
        """Staleness of each group that steps have taken since the last call of `metrics`."""

    def take(self, ages: Sequence[int]) -> None:
        """Count groups that a step has taken. ``ages`` has the staleness of each group."""
        self.ages.update(ages)
        self._taken += ages

    def give_back(self, age: int) -> None:
        """Undo the count of a group with staleness ``age`` that its step does not use."""
        self.ages[age] -= 1
        self.ages = +self.ages
        self._taken.remove(age)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the steps taken since the last call."""
        sums = self._sums()
        found = {name: float(sums[name] - self._told[name]) for name in ROLLOUT_SUMS}
        self._told = sums
        if self._taken:
            found[STALENESS_MEAN] = sum(self._taken) / len(self._taken)
            found[STALENESS_MAX] = float(max(self._taken))
        self._taken = []
        return found

    def _sums(self) -> Counter[str]:
        rejected = self._ledger.rejected.items()
        sums = {f"refused_{why.replace(' ', '_')}": number for why, number in rejected}
        sums |= {f"dropped_{STALE}": self._ledger.dropped.get(STALE, 0), **self.items}
        return Counter({f"rollout/{name}": number for name, number in sums.items()})


@dataclass(frozen=True)
class _Visit:
    """An attempt, and the names of its files that a commit needs."""

    attempt: AttemptRecord
    needed: frozenset[str]


class SampleSweep:
    """Removes sample files that no commit needs; `look` visits one attempt at a time."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._visits: list[_Visit] = []

    def plan(self, rollouts: RolloutsRecord, ledger: LedgerRecord) -> None:
        """Plan a visit to each attempt in a new commit. ``ledger`` names the needed samples."""
        needed: dict[str, set[str]] = {}
        for sample in ledger.samples:
            needed.setdefault(sample.task, set()).add(sample.file)
        self._visits = [
            _Visit(attempt, frozenset(needed.get(attempt.name, ())))
            for attempt in reversed(rollouts.attempts)
            if attempt.over or attempt.last_file is not None
        ]

    def look(self) -> None:
        """Visit the next attempt and remove its files that the commit does not need.

        Remove the whole directory of an ended attempt without needed files. The next commit retries
        failed removals.
        """
        if not self._visits:
            return
        visit = self._visits.pop()
        attempt = visit.attempt
        place = parse_name(attempt.name)
        if attempt.over and not visit.needed:
            shutil.rmtree(self._paths.rollout_task(*place), ignore_errors=True)
            return
        newest = None if attempt.over else attempt.last_file
        try:
            remove_settled(self._paths.rollout_samples(*place), visit.needed, newest)
        except EnvironmentFailure as error:
            logger.warning("cannot remove old samples of %s: %s", attempt.name, error)


class StepWait:
    """Limits a step's wait for samples to the duration of the previous step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step = -1
        self._began = clock()
        self._most_s = 0.0
        self._since: float | None = None

    def begin(self, step: int) -> None:
        """Begin a step's wait. Repeated calls in the same step have no effect."""
        if step != self._step:
            now = self._clock()
            self._step, self._began, self._most_s = step, now, now - self._began
            self._since = None

    def lasts(self) -> bool:
        """Return whether the step may wait longer. Time counts from the first call in a step."""
        now = self._clock()
        if self._since is None:
            self._since = now
        return now - self._since < self._most_s
