"""One rollout task on a simulated clock: its unfinished groups and its weights."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from slurmrl.data.ledger import LeasedItems, StoredGroup
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.workers.master.task_attempts import RolloutAttempt, TaskEvents
from slurmrl.workers.rollout_messages import Abort, Confirm, Leave, RolloutRequest


class SimulatedAttempt(RolloutAttempt):
    """An attempt whose requests stay in memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.requests: list[RolloutRequest] = []

    def post(self, *requests: RolloutRequest) -> None:
        self.requests += requests


class SilentEvents(TaskEvents):
    """Writes no events."""

    def __init__(self) -> None:
        pass


@dataclass
class SimulatedTask:
    """A task slot and its current job."""

    number: int
    attempt: int = -1
    serves: bool = False
    """Whether the task's workers have joined."""
    runs: bool = False
    """Whether the task's job runs."""
    leaving: bool = False
    since: float = 0.0
    """Start of the job."""
    versions: list[str] = field(default_factory=list)
    """Weight versions that the task has loaded, the newest last."""
    tokens: float = 0.0
    """Tokens per group from the start of the attempt until the time `at`."""
    at: float = 0.0
    items: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Lease of each unfinished group, and the index in `versions` of its oldest weights."""
    ends: list[tuple[float, int, int, str]] = field(default_factory=list)
    """Heap of (value of `tokens` at which a group ends, order, item, lease)."""
    plan: int = 0
    """Number of the planned event for the next finished group. Events with lower numbers are
    obsolete."""

    @property
    def name(self) -> str:
        return f"{ROLLOUTS}.{self.number}.{self.attempt}"

    def begin(self, now: float) -> None:
        """Start a new job."""
        self.attempt += 1
        self.runs, self.serves, self.leaving, self.since = True, False, False, now
        self.versions, self.items, self.ends = [], {}, []
        self.tokens, self.at = 0.0, now

    def end(self) -> None:
        """End the job: drop the unfinished groups and cancel the planned event."""
        self.plan += 1
        self.runs = self.serves = False
        self.items, self.ends = {}, []

    def move(self, now: float, token_s: float) -> None:
        """Add the tokens generated since the last call, at ``token_s`` seconds per token."""
        if self.items:
            self.tokens += (now - self.at) / token_s
        self.at = now

    def first_end(self) -> float | None:
        """Return the tokens per group until the first group ends; None without groups."""
        while self.ends and self.items.get(self.ends[0][2], ("",))[0] != self.ends[0][3]:
            heapq.heappop(self.ends)  # The master has aborted this group.
        return max(self.ends[0][0] - self.tokens, 0.0) if self.ends else None

    def finish(self, *, interruptible: bool) -> StoredGroup:
        """Remove the group that ends first. Return its sample."""
        end, _, item, lease = heapq.heappop(self.ends)
        self.tokens = max(self.tokens, end)
        _, first = self.items.pop(item)
        versions = self.versions[first:] if interruptible else self.versions[first : first + 1]
        return StoredGroup(
            item=item,
            task=self.name,
            lease=lease,
            file="0",
            offset=0,
            length=0,
            checksum="",
            versions=tuple(versions),
        )

    def execute(
        self, request: RolloutRequest, length: Callable[[], float], order: Iterator[int]
    ) -> None:
        """Execute a request of the master. ``length`` returns the tokens of a new group."""
        match request:
            case Confirm():
                held = {(one.lease, item) for one in request.leases for item in one.items}
                self.items = {
                    item: work for item, work in self.items.items() if (work[0], item) in held
                }
                for one in request.leases:
                    self._add(one, length, order)
            case LeasedItems():
                self._add(request, length, order)
            case Abort():
                for item in request.items:
                    if self.items.get(item, ("",))[0] == request.lease:
                        del self.items[item]
            case Leave():
                raise AssertionError("no task is surplus")

    def _add(self, request: LeasedItems, length: Callable[[], float], order: Iterator[int]) -> None:
        for item in request.items:
            if item in self.items or self.leaving:
                continue
            self.items[item] = request.lease, len(self.versions) - 1
            end = self.tokens + length()
            heapq.heappush(self.ends, (end, next(order), item, request.lease))
