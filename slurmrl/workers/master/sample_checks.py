"""Checks of finished samples, a few at each look: a step takes none that cannot be read."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from slurmrl import log
from slurmrl.backoff import HIDDEN_PAUSES_S, OUTAGE_S, Backoff
from slurmrl.data.ledger import ItemSample
from slurmrl.errors import EnvironmentFailure, SampleFileError
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.paths import RunPaths
from slurmrl.rollouts.sample_files import StoredGroup, read_once

logger = log.get(__name__)

LOOK_S = 0.1
"""After which a look begins no other check."""


@dataclass(frozen=True, order=True)
class _Check:
    due: float
    number: int
    sample: ItemSample = field(compare=False)
    failed: int = field(default=0, compare=False)
    """How often it looked damaged."""


class SampleChecks:
    """Reads each sample once, as the trainers' ranks do: what they would refuse is damaged."""

    def __init__(
        self, paths: RunPaths, clock: Callable[[], float], *, calls: SystemCalls = REAL
    ) -> None:
        self.sound: set[ItemSample] = set()
        self._paths, self._clock, self._calls = paths, clock, calls
        self._due: list[_Check] = []
        """A heap."""
        self._numbers = itertools.count()
        self._outage = Backoff(*OUTAGE_S)
        self._rests_until = clock()

    def add(self, samples: Iterable[ItemSample]) -> None:
        for sample in samples:
            heapq.heappush(self._due, _Check(self._clock(), next(self._numbers), sample))

    def keep(self, samples: Iterable[ItemSample]) -> None:
        """Forget all others."""
        wanted = set(samples)
        self.sound &= wanted
        self._due = [check for check in self._due if check.sample in wanted]
        heapq.heapify(self._due)

    def look(self) -> list[tuple[ItemSample, str]]:
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

    def _check(self, check: _Check, now: float) -> tuple[ItemSample, str] | None:
        """Read a sample; return it with the reason if it is damaged. It may only be hidden from
        this host for a while, so it counts as damaged if it still looks so after about a minute."""
        folder = self._paths.samples_of(check.sample.task)
        try:
            read_once(folder, StoredGroup.of(check.sample), calls=self._calls)
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
