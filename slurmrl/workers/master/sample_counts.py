"""What has become of the items of rollout tasks, for metrics and the status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from slurmrl.data.leases import STALE, SampleLedger
from slurmrl.plan.metrics import ROLLOUT_SUMS, STALENESS_MAX, STALENESS_MEAN


class SampleCounts:
    """Counts since the incarnation began, beside those of the ledger."""

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
        sums |= {f"dropped_{STALE}": self._ledger.dropped.get(STALE, 0), **self.items}
        return Counter({f"rollout/{name}": number for name, number in sums.items()})
