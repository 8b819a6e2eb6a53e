"""Items that masters have requested from a rollout task, and the messages about them.

`Session` is a state machine without files, processes or clocks. The session decides which items the
task generates, records, returns or forgets. An attempt answers each item of a lease at most once:
it records the samples or returns the item. `ResultWriter` writes samples and the attempt's result
log, which has no other writer. `MasterWakeups` exchanges wake-ups with the master in the asyncio
loop (see `run.channel.wakeups`). This module does not import torch.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from slurmrl import log
from slurmrl.data.ledger import LeasedItems
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.rollouts.sample_files import SampleGroup, SampleWriter
from slurmrl.run.channel.message_log import LogWriter
from slurmrl.run.channel.wakeups import LOOK_S, WakeupAddress, WakeupSocket
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Identity
from slurmrl.tensors.weights.format import VersionId
from slurmrl.workers.rollout_messages import (
    RESULT_LOG,
    Abort,
    Confirm,
    GaveBack,
    GroupsFinished,
    Joined,
    Leave,
    RolloutRequest,
    RolloutResult,
)

Key = tuple[str, int]
"""(lease, item)"""
Row = tuple[int, int]
"""(epoch, row number in the dataset)"""
ASKED = "the master told this task to exit"
logger = log.get(__name__)


@dataclass(frozen=True)
class Retirement:
    reason: str
    until: float
    """Time at which the task returns unfinished items."""


class Session:
    """The items that the masters of successive incarnations have requested.

    Between `serve` and the `Confirm` of the new master, the task neither begins nor records items,
    because it does not know which leases are valid.
    """

    def __init__(self, *, most_begun: int, most_unwritten: int) -> None:
        """Limit the number of items in progress.

        ``most_begun`` limits the items that are sampled at a time. ``most_unwritten`` limits the
        items whose samples are not yet scored or recorded. At this limit, no other item begins.
        """
        self.incarnation: int | None = None
        self.held: VersionId | None = None
        """The weight version that samples the next token; None without weights."""
        self.paused = False
        """Whether the caller currently forbids beginning items."""
        self.retirement: Retirement | None = None
        self._most_begun, self._most_unwritten = most_begun, most_unwritten
        self._confirmed = self._expired = False
        self._oldest: dict[str, VersionId] = {}
        """Mapping from lease to the oldest weight version that may sample its tokens."""
        self._waiting: dict[Key, Row] = {}
        self._begun: dict[Key, Row] = {}
        self._sampled: dict[Key, SampleGroup] = {}
        """Items whose tokens are sampled but not yet scored."""
        self._finished: dict[Key, SampleGroup] = {}
        self._returned: dict[Key, str] = {}
        """Items to return, with the reasons."""
        self._recording: dict[Key, SampleGroup] = {}
        """Items that the task is writing to disk. The master may no longer want some items."""
        self._answered: set[Key] = set()
        """Answered items of all incarnations. A new incarnation may begin at an older commit than
        the previous incarnation and request them again."""
        self._aborted: list[Key] = []

    # -- requests ----------------------------------------------------------------------------

    def serve(self, incarnation: int) -> None:
        """Record a new incarnation; wait for the `Confirm` of its master."""
        if self.incarnation is None or incarnation > self.incarnation:
            self.incarnation, self._confirmed = incarnation, False

    def take(self, request: RolloutRequest, now: float) -> None:
        """Handle a request of the newest incarnation's master, at ``now`` in seconds."""
        match request:
            case Confirm():
                self._confirm(request)
            case LeasedItems():
                self._generate(request)
            case Abort():
                self._forget({(request.lease, item) for item in request.items})
            case Leave():
                self.retire(ASKED, request.within_s, now)

    def retire(self, reason: str, within_s: float, now: float) -> None:
        """Begin no more items, and return items that are unfinished after ``within_s``.

        If there are several calls, the earliest deadline counts.
        """
        until = now + within_s
        if self.retirement is None or until < self.retirement.until:
            self.retirement = Retirement(reason, until)
        self._return(self._waiting)

    def expire(self, now: float) -> None:
        """Return unsampled items at the deadline, and record sampled items without scores."""
        if self.retirement is None or now < self.retirement.until:
            return
        self._expired = True
        self._aborted += (*self._begun, *self._sampled)
        self._return(self._begun)
        self._finished |= self._sampled
        self._sampled.clear()

    # -- what to do --------------------------------------------------------------------------

    def begin(self) -> dict[Key, Row]:
        """Return the items that the task must begin now."""
        if not self._confirmed or self.paused or self.held is None or self.retirement is not None:
            return {}
        room = self._most_begun - len(self._begun)
        if len(self._sampled) + len(self._finished) >= self._most_unwritten:
            room = 0
        ready = [key for key in self._waiting if not self.held < self._oldest[key[0]]]
        chosen = {key: self._waiting.pop(key) for key in ready[: max(room, 0)]}
        self._begun |= chosen
        return chosen

    def aborted(self) -> list[Key]:
        """Return the items that the task must abort and that no earlier call returned."""
        aborted, self._aborted = self._aborted, []
        return aborted

    def to_record(self) -> list[SampleGroup]:
        """Return the samples to record now. Call `recorded` or `unrecorded` afterwards."""
        self._recording = dict(self._finished) if self._confirmed else {}
        return list(self._recording.values())

    def to_give_back(self) -> list[GaveBack]:
        """Return the `GaveBack` answers. Their items count as answered from now on."""
        if not self._confirmed:
            return []
        found: dict[tuple[str, str], list[int]] = {}
        for (lease, item), reason in self._returned.items():
            found.setdefault((lease, reason), []).append(item)
        self._answered |= self._returned.keys()
        self._returned.clear()
        return [
            GaveBack(lease=lease, items=tuple(items), reason=reason)
            for (lease, reason), items in found.items()
        ]

    # -- events ------------------------------------------------------------------------------

    def sampled(self, key: Key, group: SampleGroup) -> None:
        """Record that an item's tokens are sampled.

        Call `finish` after they are scored. Ignore an item that is no longer wanted.
        """
        if self._begun.pop(key, None) is not None:
            self._sampled[key] = group

    def finish(self, key: Key, group: SampleGroup) -> None:
        """Record that an item is finished. Ignore an item that is no longer wanted."""
        if self._sampled.pop(key, None) is not None:
            self._finished[key] = group

    def recorded(self) -> None:
        """Mark the samples from `to_record` as answered, because they are on disk."""
        for key in self._recording:
            self._finished.pop(key, None)
        self._answered |= self._recording.keys()
        self._recording = {}

    def unrecorded(self) -> None:
        """Keep the samples from `to_record` for another try, because they are not on disk."""
        self._recording = {}

    @property
    def idle(self) -> bool:
        """Whether the task is not generating any item."""
        return not self._begun

    @property
    def answers(self) -> bool:
        """Whether there are results to record or items to return."""
        return self._confirmed and bool(self._finished or self._returned)

    @property
    def over(self) -> bool:
        """Whether the task retires and has answered all items.

        After the deadline, this is also true if no master has confirmed the leases.
        """
        at_work = self._waiting or self._begun or self._sampled or self._recording
        if self.retirement is None or at_work:
            return False
        unknown = self._expired and not self._confirmed
        return unknown or not (self._finished or self._returned)

    # -- parts -------------------------------------------------------------------------------

    def _confirm(self, request: Confirm) -> None:
        named = {(one.lease, item) for one in request.leases for item in one.items}
        known = {*self._waiting, *self._begun, *self._sampled, *self._finished, *self._returned}
        self._forget(known - named)
        self._confirmed = True
        for lease in request.leases:
            self._generate(lease)

    def _generate(self, request: LeasedItems) -> None:
        self._oldest[request.lease] = VersionId.parse(request.oldest)
        for item, row in zip(request.items, request.rows, strict=True):
            key = request.lease, item
            known = (self._begun, self._sampled, self._finished, self._returned, self._answered)
            if any(key in each for each in known):
                continue
            if key in self._recording:
                self._finished[key] = self._recording[key]
            else:
                self._waiting[key] = row
        if self.retirement is not None:
            self._return(self._waiting)

    def _forget(self, keys: set[Key]) -> None:
        for key in keys:
            if key in self._begun or key in self._sampled:
                self._aborted.append(key)
            for each in (self._waiting, self._begun, self._sampled, self._finished, self._returned):
                each.pop(key, None)

    def _return(self, items: dict[Key, Row]) -> None:
        assert self.retirement is not None, "only a retiring task returns items"
        self._returned |= dict.fromkeys(items, self.retirement.reason)
        items.clear()


class ResultWriter:
    """Writer of results, in the order of the calls."""

    def __init__(self, paths: RunPaths, agent: Identity, *, calls: SystemCalls = REAL) -> None:
        """Create the result log. Raises EnvironmentFailure, or FileExistsError if it exists."""
        place = agent.group, agent.task, agent.attempt
        self._samples = SampleWriter(paths.rollout_samples(*place), calls=calls)
        self._log = LogWriter(paths.rollout_results(*place), calls=calls, durable=True)
        self.settled = True
        """Whether all messages are on disk. If not, the next call of `record` writes them first."""
        self._append(Joined(agent=agent))

    def record(self, messages: Sequence[RolloutResult], groups: Sequence[SampleGroup]) -> None:
        """Record messages, then groups in one file.

        Raises EnvironmentFailure. After this error, the next call also records these messages, but
        the caller must pass the groups again.
        """
        if messages or not self.settled:
            self._append(*messages)
        if not groups:
            return
        stored = self._samples.write(groups)
        try:
            self._append(GroupsFinished(groups=stored))
        except EnvironmentFailure as error:
            logger.warning("cannot record %d groups, will retry: %s", len(groups), error)

    def _append(self, *messages: RolloutResult) -> None:
        self.settled = False
        self._log.append(*map(RESULT_LOG.to_json, messages))
        self.settled = True


class MasterWakeups:
    """Exchanges wake-ups with the master. Without a socket, it does nothing."""

    def __init__(self, wakeups: WakeupSocket | None, spread_s: float) -> None:
        """React to a wake-up after 0.5 to 1 times ``spread_s``; ignore other wake-ups until then.

        The random delay spreads the load, because the master may wake 1,000 tasks at once.
        """
        self._wakeups, self._spread_s = wakeups, spread_s
        self._random = random.Random()
        self._master: WakeupAddress | None = None
        self._next = asyncio.Event()
        self.heard = 0
        """Number of wake-ups from the master; all wake-ups within `LOOK_S` count as one."""
        self._counted_at = -math.inf
        """Time of the last counted wake-up, by the monotonic clock."""
        self._late: asyncio.TimerHandle | None = None
        """Timer for the later count of wake-ups within `LOOK_S`; None without such wake-ups."""

    @property
    def address(self) -> WakeupAddress | None:
        return None if self._wakeups is None else self._wakeups.address

    def wake_at(self, master: WakeupAddress | None) -> None:
        """From now on, exchange wake-ups with the master at this address; None for no master."""
        self._master = master

    def wake(self) -> None:
        """Tell the master by a wake-up that results are recorded."""
        if self._wakeups is not None and self._master is not None:
            self._wakeups.wake([self._master])

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for wake-ups during the block; close the socket at its end."""
        if self._wakeups is None:
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(self._wakeups.fileno(), self._receive)
        try:
            yield
        finally:
            loop.remove_reader(self._wakeups.fileno())
            self._wakeups.close()
            if self._late is not None:
                self._late.cancel()

    async def rest(self, heard: int, seconds: float) -> None:
        """Wait until `heard` differs from its earlier value ``heard``, at most ``seconds``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.heard == heard:
                    await self._next.wait()
                await asyncio.sleep(self._spread_s * self._random.uniform(0.5, 1.0))

    def _receive(self) -> None:
        assert self._wakeups is not None, "only an existing socket is registered"
        sources = self._wakeups.receive().sources
        if self._master is None or self._master.source not in sources or self._late is not None:
            return
        early_s = self._counted_at + LOOK_S - time.monotonic()
        if early_s > 0:
            self._late = asyncio.get_running_loop().call_later(early_s, self._count)
        else:
            self._count()

    def _count(self) -> None:
        self._late, self._counted_at = None, time.monotonic()
        self.heard += 1
        self._next.set()
        self._next = asyncio.Event()
