"""The samples of rollout tasks in the master: their checks, counts and removal.

A few finished samples are checked at each look: a step takes none that cannot be read. Samples that
no commit needs are removed, also a little at each look.
"""

from __future__ import annotations

import heapq
import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from slurmrl import log
from slurmrl.backoff import HIDDEN_PAUSES_S, OUTAGE_S, Backoff
from slurmrl.data.leases import STALE, SampleLedger
from slurmrl.data.ledger import LedgerRecord, StoredGroup
from slurmrl.errors import EnvironmentFailure, SampleFileError
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.plan.metrics import ROLLOUT_SUMS, STALENESS_MAX, STALENESS_MEAN
from slurmrl.rollouts.sample_files import read_once, remove_settled
from slurmrl.run.paths import RunPaths
from slurmrl.workers.master.attempts import AttemptRecord, RolloutsRecord, parse_name

logger = log.get(__name__)

LOOK_S = 0.1
"""After which a look begins no other check."""


@dataclass(frozen=True, order=True)
class _Check:
    due: float
    number: int
    sample: StoredGroup = field(compare=False)
    failed: int = field(default=0, compare=False)
    """How often it looked damaged."""


class SampleChecks:
    """Reads each sample once, as the trainers' ranks do: what they would refuse is damaged."""

    def __init__(
        self, paths: RunPaths, clock: Callable[[], float], *, calls: SystemCalls = REAL
    ) -> None:
        self.sound: set[StoredGroup] = set()
        self._paths, self._clock, self._calls = paths, clock, calls
        self._due: list[_Check] = []
        """A heap."""
        self._numbers = itertools.count()
        self._outage = Backoff(*OUTAGE_S)
        self._rests_until = clock()

    def add(self, samples: Iterable[StoredGroup]) -> None:
        for sample in samples:
            heapq.heappush(self._due, _Check(self._clock(), next(self._numbers), sample))

    def keep(self, samples: Iterable[StoredGroup]) -> None:
        """Forget all others."""
        wanted = set(samples)
        self.sound &= wanted
        self._due = [check for check in self._due if check.sample in wanted]
        heapq.heapify(self._due)

    def look(self) -> list[tuple[StoredGroup, str]]:
        """Check what is due. Returns what is damaged, with the reasons."""
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
        """Read a sample; return it with the reason if it is damaged. It may only be hidden from
        this host for a while, so it counts as damaged if it still looks so after about a minute."""
        folder = self._paths.samples_of(check.sample.task)
        try:
            read_once(folder, check.sample, calls=self._calls)
        except SampleFileError as error:
            pauses_s = HIDDEN_PAUSES_S if self._calls.caches(folder) else ()
            if check.failed == len(pauses_s):
                return check.sample, str(error)
            due = now + pauses_s[check.failed]
            heapq.heappush(self._due, replace(check, due=due, failed=check.failed + 1))
        except EnvironmentFailure as error:
            self._rests_until = now + self._outage.next_s()
            heapq.heappush(self._due, replace(check, due=self._rests_until))
            logger.warning("samples cannot be read now, will retry: %s", error)
        else:
            self._outage.reset()
            self.sound.add(check.sample)
        return None


class SampleCounts:
    """Counts since the incarnation began; the ledger has the others."""

    def __init__(self, ledger: SampleLedger) -> None:
        self._ledger = ledger
        self.items: Counter[str] = Counter()
        """``damaged``, ``aborted``, ``given_back`` and ``lost`` items."""
        self.ages: Counter[int] = Counter()
        """Groups that steps have taken, by staleness."""
        self._told = Counter({f"rollout/dropped_{STALE}": ledger.dropped.get(STALE, 0)})
        """The sums that the last metrics included."""
        self._taken: list[int] = []
        """Staleness of the groups taken since then."""

    def take(self, ages: Sequence[int]) -> None:
        """A step has taken groups of this staleness."""
        self.ages.update(ages)
        self._taken += ages

    def give_back(self, age: int) -> None:
        """A step does without a group of this staleness that it has taken."""
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
        refused = self._ledger.refused.items()
        sums = {f"refused_{why.replace(' ', '_')}": number for why, number in refused}
        sums |= {f"dropped_{STALE}": self._ledger.dropped.get(STALE, 0), **self.items}
        return Counter({f"rollout/{name}": number for name, number in sums.items()})


@dataclass(frozen=True)
class _Visit:
    """An attempt, and those of its files that a commit needs."""

    attempt: AttemptRecord
    needed: frozenset[str]


class SampleSweep:
    """Visits the attempts of the newest commit, one at a look."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._visits: list[_Visit] = []

    def plan(self, rollouts: RolloutsRecord, ledger: LedgerRecord) -> None:
        """Start from a commit that holds these."""
        needed: dict[str, set[str]] = {}
        for sample in ledger.samples:
            needed.setdefault(sample.task, set()).add(sample.file)
        self._visits = [
            _Visit(attempt, frozenset(needed.get(attempt.name, ())))
            for attempt in reversed(rollouts.attempts)
            if attempt.over or attempt.last_file is not None
        ]

    def look(self) -> None:
        """Visit the next attempt: remove the files that the commit has no need of, or the whole
        directory of one that is over. What fails is tried again after the next commit."""
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
    """In all no longer than the step before took."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step = -1
        self._began = clock()
        self._most_s = 0.0
        self._since: float | None = None

    def begin(self, step: int) -> None:
        """Call it whenever a step asks for samples."""
        if step != self._step:
            now = self._clock()
            self._step, self._began, self._most_s = step, now, now - self._began
            self._since = None

    def lasts(self) -> bool:
        """Whether to go on waiting. The first call of a step begins to count."""
        now = self._clock()
        if self._since is None:
            self._since = now
        return now - self._since < self._most_s
