"""Which attempts of rollout tasks get items, how many, and when items are taken back.

See "Leases of samples" in docs/protocols.md.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from slurmrl.data.leases import Admission, SampleLedger
from slurmrl.data.ledger import LeasedItems
from slurmrl.run.channel.bell import BellAddress
from slurmrl.run.history.lineage import Lineage
from slurmrl.tensors.weights.version import VersionId
from slurmrl.workers.master.attempts import RolloutAttempt, TaskEvents
from slurmrl.workers.master.samples import SampleCounts
from slurmrl.workers.rollout_messages import (
    COUNTS_S,
    Abort,
    Confirm,
    GenerateItems,
    Leave,
    RequestedItem,
)

LAG_S = 10.0
"""How much longer an attempt may take for new weights than twice what it took the last time, before
its share of the items goes to others."""

SILENT_S = 6 * COUNTS_S
"""Without a message while its log can be read, after which a living attempt counts as unable to
write."""


class TaskLeases:
    """Leases the items of a ledger to living attempts, as far as their weights allow."""

    def __init__(
        self,
        ledger: SampleLedger,
        lineage: Lineage,
        admission: Admission,
        living: Mapping[str, RolloutAttempt],
        counts: SampleCounts,
        events: TaskEvents,
        bell: BellAddress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``living``: the attempts that are not over, by name, which the caller keeps up to
        date. ``bell``: where they may ring."""
        self.step = 0
        """The last one that was trained; for the caller to set."""
        self.rows: Callable[[Iterable[int]], Sequence[tuple[int, int]]] | None = None
        """Gives (epoch, index) of each item; for the caller to set before anything is leased."""
        self._ledger = ledger
        self._lineage = lineage
        self._admission = admission
        self._living = living
        self._counts = counts
        self._events = events
        self._bell = bell
        self._clock = clock
        self._newest: str | None = None
        """The newest version that an attempt has taken."""
        self._newest_at = clock()

    # -- who may have items ------------------------------------------------------------------

    def note(self, attempt: RolloutAttempt, version: str) -> None:
        """Note how much later than others an attempt has taken the newest weights."""
        now = self._clock()
        if self._newest is None or VersionId.parse(self._newest) < VersionId.parse(version):
            self._newest, self._newest_at = version, now
        if version == self._newest:
            attempt.lag_s = now - self._newest_at

    def able(self) -> dict[str, str]:
        """The attempts that may get leases, each with the version that it holds."""
        held = {
            one.name: one.record.version
            for one in self._living.values()
            if one.confirmed and not one.leaving and one.record.version is not None
        }
        of_use = self._of_use({*held.values()})
        return {name: version for name, version in held.items() if version in of_use}

    def _of_use(self, names: Collection[str]) -> dict[str, VersionId]:
        """Those of the versions with whose tokens the next step could be trained."""
        versions = {name: VersionId.parse(name) for name in names}
        first = self.step - self._admission.max_staleness
        return {
            name: one
            for name, one in versions.items()
            if one.step >= first and self._lineage.has(one.step, one.incarnation)
        }

    def _expected(self) -> set[str]:
        """The attempts that have not taken the newest weights yet but should soon, and then need
        items too."""
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
        """The attempts that live and cannot write, if there are others that can work for them."""
        silent = {one.name for one in self._living.values() if one.silent_s >= SILENT_S}
        return silent if self.able().keys() - silent else set()

    # -- leases ------------------------------------------------------------------------------

    def take_back(self) -> None:
        """Queue items again whose samples would be too stale for every step to come, and those of
        attempts that cannot write: without staleness a step waits for them alone."""
        oldest, silent = self._ledger.oldest, self._silent()
        useless = oldest - self._of_use(oldest).keys()
        for lease in self._ledger.leases if useless or silent else ():
            attempt = self._living[lease.holder]
            too_old = lease.oldest in useless and attempt.is_read
            if not too_old and lease.holder not in silent:
                continue  # it may have finished them
            returned = self._ledger.return_items(lease.lease, lease.items)
            self._counts.items["aborted"] += len(returned)
            if attempt.confirmed:
                attempt.post(Abort(lease=lease.lease, items=lease.items))
            if lease.holder in silent:
                self._events.silent(attempt, len(returned))

    def confirm(self) -> None:
        """Tell attempts which leases hold, once all that they had said before is known."""
        for attempt in self._living.values():
            if attempt.is_read and attempt.record.agent is not None and not attempt.confirmed:
                self.post(attempt)

    def post(self, attempt: RolloutAttempt, *requests: Leave) -> None:
        """Post requests, of which the first of a log says which leases hold."""
        if not attempt.confirmed:
            attempt.confirmed = True
            held = self._ledger.leases_of(attempt.name)
            leases = tuple(map(self._request, held))
            attempt.post(Confirm(leases=leases, bell=self._bell))
        attempt.post(*requests)

    def grant(self) -> None:
        """Lease items to those who have the least to do, as far as their weights allow, and to none
        more than its share of what may be with tasks now."""
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

    def _request(self, lease: LeasedItems) -> GenerateItems:
        assert self.rows is not None
        rows = zip(lease.items, self.rows(lease.items), strict=True)
        items = (
            RequestedItem(item=item, epoch=epoch, index=index) for item, (epoch, index) in rows
        )
        return GenerateItems(lease=lease.lease, items=tuple(items), oldest=lease.oldest)


def dealt(loads: Mapping[str, int], rooms: Mapping[str, int], share: int) -> Counter[str]:
    """Items for each task, one after the other to the one with the least: none gets more than its
    ``share`` with its load, nor any that exceeds its room, which counts those of all."""
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
