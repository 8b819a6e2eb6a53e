"""The ledger: the master's account of a trial's data. Torch-free.

Items are numbered by their place in the endless order of the dataset (see `data.order`). Each item
is queued, in flight for a step, trained at a step, or dropped for a reason. Items may finish in any
order. A commit contains the ledger as a `LedgerRecord`. The record's size does not depend on the
length of the trial: it lists only taken items after the first unfinished item. With rollout tasks,
the record also lists leased items and samples (see `data.leases`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, TypeVar

from slurmrl.fsio.calls import corrupt
from slurmrl.fsio.documents import FILE_NAME, MOST_COUNT, SIZE, FieldType
from slurmrl.tensors.checkpoint.tensors import KIND
from slurmrl.tensors.weights.format import VERSION, VersionId

Value = TypeVar("Value", int, str)
Number = Annotated[int, SIZE]
_LEASE = re.compile(r"[A-Za-z0-9._-]{1,64}")


def _are_versions(value: Any) -> bool:
    if not isinstance(value, list) or not value or not all(map(VERSION.accepts, value)):
        return False
    found = [VersionId.parse(name) for name in value]
    return all(old < new for old, new in pairwise(found))


LEASE = FieldType(
    "the number of a lease", lambda value: isinstance(value, str) and bool(_LEASE.fullmatch(value))
)
VERSIONS = FieldType("a list of weight versions, from old to new", _are_versions)
CHECKSUM = FieldType(
    f"{KIND}:<hex digits>", lambda value: isinstance(value, str) and value.startswith(f"{KIND}:")
)


@dataclass(frozen=True, kw_only=True)
class StepRun:
    """The items ``first`` to ``stop - 1``, which are in flight for a step or trained at it."""

    first: Number
    stop: Number
    step: Number


@dataclass(frozen=True, kw_only=True)
class DroppedRun:
    """The items ``first`` to ``stop - 1``, which were dropped for one reason."""

    first: Number
    stop: Number
    reason: str


@dataclass(frozen=True, kw_only=True)
class DropCount:
    reason: str
    items: Number


@dataclass(frozen=True, kw_only=True)
class LeasedItems:
    """Items that a lease still holds, as the ledger and requests to the holder list them.

    A request asks for the completions of each item. The plan has the number of completions and the
    sampling options.
    """

    lease: str
    """``<incarnation>.<number>``, unique in a trial."""
    holder: str
    """The task attempt that holds the lease."""
    items: tuple[Number, ...]
    oldest: Annotated[str, VERSION]
    """The weights that the holder had when it got the lease; no token is from older weights."""
    rows: tuple[tuple[Number, Number], ...] = ()
    """Epoch of each item, and its row number in the dataset. Only requests have epochs and row
    numbers, because the ledger's owner computes them from the order of the dataset."""


@dataclass(frozen=True, kw_only=True)
class StoredGroup:
    """Place of the samples of an item, and the facts that decide about their use.

    Result logs, the ledger and `LoadBatch` contain such places.
    """

    item: Number
    task: Annotated[str, FILE_NAME] = ""
    """Directory of the task attempt that made the group; empty in the attempt's own log."""
    lease: Annotated[str, LEASE]
    file: Annotated[str, FILE_NAME]
    """File in the directory of the attempt's samples."""
    offset: Number
    length: Number
    """Number of bytes of the group in the file."""
    checksum: Annotated[str, CHECKSUM]
    """Checksum of the group's bytes (see `tensors.checkpoint.tensors`)."""
    versions: Annotated[tuple[str, ...], VERSIONS]
    """Versions of the weights that sampled the group's tokens, from old to new; at least one."""


@dataclass(frozen=True, kw_only=True)
class LedgerRecord:
    """A ledger in a commit.

    All items from ``settled`` to ``next`` that no field lists are queued again.
    """

    settled: Number = 0
    """All items before this item are trained or dropped."""
    next: Number = 0
    """First item that was never taken."""
    in_flight: tuple[StepRun, ...] = ()
    trained: tuple[StepRun, ...] = ()
    dropped: tuple[DroppedRun, ...] = ()
    dropped_before: tuple[DropCount, ...] = ()
    """Drop counts of the items before ``settled``."""
    leased: tuple[LeasedItems, ...] = ()
    samples: tuple[StoredGroup, ...] = ()
    """Samples of finished items and of items in flight. After a restart, items of an uncommitted
    step are finished again."""

    def check(self, where: object) -> None:
        """Raise CorruptFileError that names ``where`` if the fields contradict each other."""
        if not self.settled <= self.next <= self.settled + MOST_COUNT:
            problem = f"has 'settled' {self.settled} and 'next' {self.next}: expected at most"
            raise corrupt(where, f"{problem} {MOST_COUNT} items between them")
        if sum(count.items for count in self.dropped_before) > self.settled:
            raise corrupt(where, f"has more dropped items than its {self.settled} settled items")
        if len({one.lease for one in self.leased}) < len(self.leased):
            raise corrupt(where, "lists a lease twice")
        if bare := [sample.item for sample in self.samples if not sample.task]:
            raise corrupt(where, f"has samples without a task attempt: {bare}")
        end = self.settled
        for first, stop in sorted(self._runs()):
            if not end <= first < stop <= self.next:
                raise corrupt(where, f"lists items {first} to {stop - 1} twice, or out of place")
            end = stop

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Yield all items that the record names, as runs (first, stop)."""
        runs: list[StepRun | DroppedRun] = [*self.in_flight, *self.trained, *self.dropped]
        yield from ((run.first, run.stop) for run in runs)
        yield from ((item, item + 1) for lease in self.leased for item in lease.items)
        yield from ((sample.item, sample.item + 1) for sample in self.samples)


class Ledger:
    """Record of the state of all items.

    All items are queued at first, or the ledger continues the record of a commit. Items that were
    in flight, leased or finished at the commit are queued again.
    """

    def __init__(self, record: LedgerRecord | None = None) -> None:
        record = record or LedgerRecord()
        self._settled = record.settled
        self._next = record.next
        self._in_flight: dict[int, int] = {}
        """Step of each item in flight. This table and the next two omit items before `_settled`."""
        self._trained = _expanded((run.first, run.stop, run.step) for run in record.trained)
        self._dropped = _expanded((run.first, run.stop, run.reason) for run in record.dropped)
        self._dropped_before = Counter(
            {count.reason: count.items for count in record.dropped_before}
        )
        done = self._trained.keys() | self._dropped.keys()
        self._queued_again = set(range(self._settled, self._next)) - done

    @property
    def settled(self) -> int:
        """The first item that is neither trained nor dropped."""
        return self._settled

    @property
    def trained(self) -> int:
        """Number of trained items."""
        return self._settled - sum(self._dropped_before.values()) + len(self._trained)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Numbers of dropped items by reason."""
        return self._dropped_before + Counter(self._dropped.values())

    def take(self, count: int, step: int) -> list[int]:
        """Take the first queued items for a step; they are then in flight.

        Raises ValueError if too many items would be unfinished for a commit.
        """
        taken = self._dequeue(count)
        self._in_flight.update(dict.fromkeys(taken, step))
        return taken

    def train(self, items: Iterable[int], step: int) -> None:
        """Count items in flight as trained at a step.

        Raises ValueError, before any change, for an item not in flight: it would be trained twice.
        """
        self._trained.update(dict.fromkeys(self._landed(items), step))
        self._settle()

    def drop(self, items: Iterable[int], reason: str) -> None:
        """Count items in flight as dropped: they are never trained. Raises as `train`."""
        self._dropped.update(dict.fromkeys(self._landed(items), reason))
        self._settle()

    def give_back(self, items: Iterable[int]) -> None:
        """Queue items in flight again, before items that were never taken. Raises as `train`."""
        self._queued_again.update(self._landed(items))

    def record(self) -> LedgerRecord:
        return LedgerRecord(
            settled=self._settled,
            next=self._next,
            in_flight=step_runs(self._in_flight),
            trained=step_runs(self._trained),
            dropped=tuple(
                DroppedRun(first=first, stop=stop, reason=reason)
                for first, stop, reason in _runs(self._dropped)
            ),
            dropped_before=tuple(
                DropCount(reason=reason, items=items)
                for reason, items in sorted(self._dropped_before.items())
            ),
        )

    def _dequeue(self, count: int) -> list[int]:
        """Remove the first queued items from the queue. Raises ValueError as `take` does."""
        again = sorted(self._queued_again)[:count]
        end = self._next + count - len(again)
        if end - self._settled > MOST_COUNT:
            raise ValueError(f"more than {MOST_COUNT} items follow the first unfinished item")
        self._queued_again.difference_update(again)
        first, self._next = self._next, end
        return [*again, *range(first, end)]

    def _landed(self, items: Iterable[int]) -> list[int]:
        """Remove items from the items in flight, and return them. Raises as `train`."""
        landed = list(items)
        if len(set(landed)) < len(landed) or not self._in_flight.keys() >= set(landed):
            wrong = sorted(item for item in landed if item not in self._in_flight) or landed
            raise ValueError(f"items {wrong} must be in flight and occur once")
        for item in landed:
            del self._in_flight[item]
        return landed

    def _settle(self) -> None:
        """Move `_settled` past the trained and dropped items, and delete their entries."""
        while True:
            if (reason := self._dropped.pop(self._settled, None)) is not None:
                self._dropped_before[reason] += 1
            elif self._trained.pop(self._settled, None) is None:
                return
            self._settled += 1


def _expanded(runs: Iterable[tuple[int, int, Value]]) -> dict[int, Value]:
    return {item: value for first, stop, value in runs for item in range(first, stop)}


def _runs(values: Mapping[int, Value]) -> Sequence[tuple[int, int, Value]]:
    """Return the runs (first, stop, value) of adjacent items with equal values, in order."""
    runs: list[tuple[int, int, Value]] = []
    for item in sorted(values):
        value = values[item]
        if runs and runs[-1][1:] == (item, value):
            runs[-1] = (runs[-1][0], item + 1, value)
        else:
            runs.append((item, item + 1, value))
    return runs


def step_runs(steps: Mapping[int, int]) -> tuple[StepRun, ...]:
    return tuple(StepRun(first=first, stop=stop, step=step) for first, stop, step in _runs(steps))
