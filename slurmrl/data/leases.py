"""The ledger of a trial whose samples come from rollout tasks. Torch-free.

An item is queued, leased to a task attempt, finished (it has a sample), in flight for a step,
trained at a step, or dropped for a reason. The master grants leases, reads results and decides when
a holder is lost. A result counts only if its lease holds its item, so late or repeated results do
no harm. See "Leases of samples" in docs/protocols.md.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from slurmrl.data.ledger import LeasedItems, Ledger, LedgerRecord, StoredGroup, step_runs
from slurmrl.run.history.state import Lineage
from slurmrl.tensors.weights.format import VersionId

STALE: Final = "stale"
"""Reason for a drop: the weights that sampled the item's completions are too old."""
LATE: Final = "late"
"""Reason why a result does not count: its lease never held, or no longer holds, its item."""
ROLLED_BACK: Final = "rolled back"
"""Reason why a sample does not count: some of its tokens are from weights that training has
abandoned."""
USED_STEPS: Final = 8
"""Number of recent steps that `SampleLedger.expected` considers."""


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Limit on how far rollouts may run ahead of training, by the rule of AReaL.

    With the weights of one version, items are generated for the next ``max_staleness + 1`` steps
    and no more. A step uses more items than its batch has if a filter drops some.
    """

    max_staleness: int
    """Maximum number of steps between the oldest weights that sampled a token of an item and the
    weights that are trained on the item."""
    batch_size: int
    """Items of a step."""
    max_leased: int | None
    """Maximum number of items on which all tasks together may work; None for no limit."""
    filter_rounds: int = 1
    """Maximum number of batches that a step uses."""

    def room(
        self, *, version: int, step: int, leased: int, finished: int, in_flight: int, used: int
    ) -> int:
        """Return how many more items may be leased.

        ``version`` is the step of the newest weights available to the tasks, and ``step`` the last
        trained step. Tasks work on ``leased`` items; ``finished`` and ``in_flight`` count further
        items. Each step after the next step is expected to use ``used`` items, at least a batch.

        AReaL counts the trained items. This rule uses ``step * batch_size`` instead, so that steps
        with fewer items (filters, an earlier batch size) do not change the result.
        """
        further = self.max_staleness + version - step
        if further < 0:
            return 0
        lacking = self.batch_size - min(in_flight, self.batch_size)
        room = lacking + further * used - finished - leased
        if self.max_leased is not None:
            room = min(room, self.max_leased - leased)
        return max(0, room)


class SampleLedger(Ledger):
    """A ledger that starts with all items queued, or from the record of a commit.

    Leases of the record stay valid until the master confirms or loses their holders. Samples of the
    record are finished, even if they were in flight at the commit. The items of samples that are
    rolled back are queued again.
    """

    def __init__(
        self, incarnation: int, lineage: Lineage, record: LedgerRecord | None = None
    ) -> None:
        """``lineage`` belongs to the new ``incarnation``; leases in the record are older."""
        record = record or LedgerRecord()
        super().__init__(record)
        self.rejected: Counter[str] = Counter()
        """Mapping from a reason to the number of this incarnation's results that it rejected."""
        self._incarnation = incarnation
        self._lineage = lineage
        self._granted = 0
        self._leases: dict[str, LeasedItems] = {}
        self._by_holder: dict[str, list[str]] = {}
        """Names of the leases by holder, in the order of their grants; no entry without leases."""
        for lease in record.leased:
            self._hold(lease)
        self._finished = {one.item: one for one in record.samples if self._counts(one)}
        self._oldest = {item: oldest_step(one) for item, one in self._finished.items()}
        """The step of the oldest weights of each finished item."""
        self._in_use: dict[int, StoredGroup] = {}
        """Samples of items in flight."""
        self._used = 0
        """Number of items trained, or dropped by a filter, since the last step was trained."""
        self._used_by: deque[int] = deque(maxlen=USED_STEPS)
        """Number of items that each of the last steps used."""
        for held in self._leases.values():
            self._queued_again.difference_update(held.items)
        self._queued_again -= self._finished.keys()

    # -- rollout tasks -----------------------------------------------------------------------

    @property
    def holders(self) -> list[str]:
        """Names of the holders of leases, sorted."""
        return sorted(self._by_holder)

    @property
    def leased(self) -> int:
        """Number of leased items."""
        return sum(len(held.items) for held in self._leases.values())

    @property
    def leases(self) -> tuple[LeasedItems, ...]:
        """All leases that hold items."""
        return tuple(self._leases.values())

    @property
    def oldest(self) -> frozenset[str]:
        """Set of each lease's oldest weight version."""
        return frozenset(held.oldest for held in self._leases.values())

    def leases_of(self, holder: str) -> tuple[LeasedItems, ...]:
        return tuple(self._leases[lease] for lease in self._by_holder.get(holder, ()))

    def leased_by(self, holder: str) -> int:
        """Return the number of items that a holder has leased."""
        return sum(len(lease.items) for lease in self.leases_of(holder))

    @property
    def finished(self) -> Sequence[StoredGroup]:
        """The samples that wait for a step."""
        return tuple(self._finished.values())

    def room(self, admission: Admission, *, version: int, step: int) -> int:
        """Return how many more items may be leased now (see `Admission.room`)."""
        return admission.room(
            version=version,
            step=step,
            leased=self.leased,
            finished=len(self._finished),
            in_flight=len(self._in_flight),
            used=self.expected(admission.batch_size, admission),
        )

    def lease(self, count: int, holder: str, oldest: str) -> LeasedItems:
        """Lease the first queued items to a holder that has the weights of the version ``oldest``.

        Raises ValueError as `take` does.
        """
        items = tuple(self._dequeue(count))
        self._granted += 1
        name = f"{self._incarnation}.{self._granted}"
        lease = LeasedItems(lease=name, holder=holder, items=items, oldest=oldest)
        if items:
            self._hold(lease)
        return lease

    def finish(self, lease: str, sample: StoredGroup) -> bool:
        """Take the sample of a leased item.

        Return whether the sample counts (see `rejected`). If the sample is rolled back, queue its
        item again.
        """
        if not self._release(lease, (sample.item,)):
            self.rejected[LATE] += 1
            return False
        if not self._counts(sample):
            self._queued_again.add(sample.item)
            return False
        self._finish(sample)
        return True

    def return_items(self, lease: str, items: Iterable[int]) -> list[int]:
        """Queue again the items that the lease still holds, and return them; ignore others."""
        returned = self._release(lease, items)
        self._queued_again.update(returned)
        return returned

    def redo(self, sample: StoredGroup) -> bool:
        """Queue an item again because its finished sample cannot be read.

        Return whether the sample waited for a step. Ignore other samples.
        """
        if self._finished.get(sample.item) != sample:
            return False
        self._unfinish(sample.item)
        self._queued_again.add(sample.item)
        return True

    def lose(self, holder: str) -> list[int]:
        """Queue again all items that a holder has leased, and return them."""
        lost = self.leases_of(holder)
        return sorted(item for one in lost for item in self.return_items(one.lease, one.items))

    # -- training ----------------------------------------------------------------------------

    def take_finished(
        self,
        count: int,
        step: int,
        max_staleness: int,
        *,
        most: int | None = None,
        sound: Container[StoredGroup] | None = None,
    ) -> Sequence[StoredGroup]:
        """Take the finished items with the oldest samples for a step.

        The step changes the weights of step ``step - 1``, and the items are then in flight. Items
        whose samples are too stale for the step are dropped.

        Take ``count`` items. If ``most`` is given, take up to ``most`` items; take more only if no
        later step can take them. If ``sound`` is given, only the samples in it are
        available. Take none if fewer than ``count`` items are available.
        """
        first = step - 1 - max_staleness
        for item in [item for item, oldest in self._oldest.items() if oldest < first]:
            self._unfinish(item)
            self._dropped[item] = STALE
        self._settle()
        if len(self._finished) < count:
            return ()
        ready = [item for item, one in self._finished.items() if sound is None or one in sound]
        if len(ready) < count:
            return ()
        ready.sort(key=lambda item: (self._oldest[item], item))
        if most is not None:
            count = max(most, sum(self._oldest[item] == first for item in ready))
        taken = [self._unfinish(item) for item in ready[:count]]
        self._in_use.update({sample.item: sample for sample in taken})
        self._in_flight.update({sample.item: step for sample in taken})
        return taken

    def stragglers(self, step: int, max_staleness: int) -> set[str]:
        """Return the holders of items that no later step could use, even if they finished now."""
        first = step - 1 - max_staleness
        return {
            held.holder
            for held in self._leases.values()
            if VersionId.parse(held.oldest).step == first
        }

    def expected(self, count: int, admission: Admission) -> int:
        """Return how many items a step probably uses to train ``count`` items.

        The result is at least ``count``. The last `USED_STEPS` steps give the number of items per
        batch. The minimum is used, because surplus items would become stale.
        """
        batch = admission.batch_size
        fewest = min(self._used_by, default=batch)
        used = max(batch, min(fewest, admission.filter_rounds * batch))
        return -(-count * used // batch)

    def train(self, items: Iterable[int], step: int) -> None:
        trained = list(items)
        super().train(trained, step)
        self._used_by.append(self._used + len(trained))
        self._used = 0

    def drop(self, items: Iterable[int], reason: str) -> None:
        dropped = list(items)
        super().drop(dropped, reason)
        self._used += len(dropped)

    def give_back(self, items: Iterable[int]) -> None:
        """Return items in flight to the finished items if they have samples, else to the queue.

        Raises as `train`.
        """
        items = list(items)
        samples = [self._in_use[item] for item in items if item in self._in_use]
        super().give_back(items)
        for sample in samples:
            self._queued_again.remove(sample.item)
            self._finish(sample)

    def record(self) -> LedgerRecord:
        samples = self._finished | self._in_use
        without = {item: step for item, step in self._in_flight.items() if item not in samples}
        return replace(
            super().record(),
            in_flight=step_runs(without),
            leased=self.leases,
            samples=tuple(samples[item] for item in sorted(samples)),
        )

    # -- inside ------------------------------------------------------------------------------

    def _counts(self, sample: StoredGroup) -> bool:
        """Return whether the current weights descend from all weights that sampled ``sample``."""
        versions = map(VersionId.parse, sample.versions)
        if all(self._lineage.has(one.step, one.incarnation) for one in versions):
            return True
        self.rejected[ROLLED_BACK] += 1
        return False

    def _hold(self, lease: LeasedItems) -> None:
        self._leases[lease.lease] = lease
        self._by_holder.setdefault(lease.holder, []).append(lease.lease)

    def _finish(self, sample: StoredGroup) -> None:
        self._finished[sample.item] = sample
        self._oldest[sample.item] = oldest_step(sample)

    def _unfinish(self, item: int) -> StoredGroup:
        """Remove an item from the finished items; return its sample."""
        del self._oldest[item]
        return self._finished.pop(item)

    def _release(self, lease: str, items: Iterable[int]) -> list[int]:
        """Remove items from a lease. Return the items that the lease held."""
        held = self._leases.get(lease)
        if held is None:
            return []
        named = set(items)
        released = [item for item in held.items if item in named]
        left = tuple(item for item in held.items if item not in named)
        self._leases[lease] = replace(held, items=left)
        if not left:
            del self._leases[lease]
            self._by_holder[held.holder].remove(lease)
            if not self._by_holder[held.holder]:
                del self._by_holder[held.holder]
        return released

    def _landed(self, items: Iterable[int]) -> list[int]:
        landed = super()._landed(items)
        for item in landed:
            self._in_use.pop(item, None)
        return landed


def oldest_step(sample: StoredGroup) -> int:
    """Return the step of the oldest weights that sampled a token of a sample."""
    return min(VersionId.parse(name).step for name in sample.versions)
