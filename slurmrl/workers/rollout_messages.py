"""The messages between the master and the attempts of rollout tasks.

There is a request log for each incarnation and attempt, and one result log for each attempt. A
later incarnation continues to read the result log at the place in the last commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, TypeAlias

from slurmrl.data.ledger import LEASE, LeasedItems, StoredGroup
from slurmrl.fsio.documents import NUMBER, SECONDS, SIZE
from slurmrl.run.channel.wakeups import WakeupAddress
from slurmrl.run.reports import Identity
from slurmrl.tensors.weights.format import VERSION
from slurmrl.workers.messages import MessageSet

# -- master to a task, in the request log ----------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Confirm:
    """The first message of a log: the knowledge of this incarnation's master about the attempt.

    Other leases have ended: their unfinished items are no longer wanted.
    """

    leases: tuple[LeasedItems, ...] = ()
    """The leases that are still valid, with the items for which the master has no result. An
    earlier incarnation may have made the request, in a log that the task has not read."""
    wakeups: WakeupAddress | None = None
    """The master's address for wake-ups when results are recorded."""


@dataclass(frozen=True, kw_only=True)
class Abort:
    """These items are no longer wanted unless they are finished; the master expects no answer."""

    lease: Annotated[str, LEASE]
    items: tuple[Annotated[int, SIZE], ...]


@dataclass(frozen=True, kw_only=True)
class Leave:
    """Finish all items or give them back, and exit."""

    within_s: Annotated[float, SECONDS]


RolloutRequest: TypeAlias = Confirm | LeasedItems | Abort | Leave


# -- a task to the masters, in its result log ------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The first message of a log: the task's agent, whose lease shows that it is alive."""

    agent: Identity


@dataclass(frozen=True, kw_only=True)
class GroupsFinished:
    """The samples of these groups are on disk."""

    groups: tuple[StoredGroup, ...]


@dataclass(frozen=True, kw_only=True)
class GaveBack:
    """These items will not be finished under the lease, because the task retires."""

    lease: Annotated[str, LEASE]
    items: tuple[Annotated[int, SIZE], ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """The task takes no more requests and finishes or gives back its items."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Holds:
    """The task's weight version, which samples the next token."""

    version: Annotated[str, VERSION]


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """A published version that the task cannot read. It tries again at the next publication."""

    version: Annotated[str, VERSION]
    reason: str


@dataclass(frozen=True, kw_only=True)
class WakeTask:
    """The task's address for wake-ups about requests and weights. Each incarnation gets it."""

    wakeups: WakeupAddress | None = None  # `bell` in old logs is obsolete


COUNTS_S: Final = 30.0
"""Seconds between two reports of an attempt's counts, even if it is idle."""


@dataclass(frozen=True, kw_only=True)
class RolloutCounts:
    """Counters since the attempt began, such as ``tokens``, and the current problem."""

    counts: Mapping[str, Annotated[float, NUMBER]] = field(default_factory=dict)
    problem: str = ""
    """Reason why the task cannot take newer weights; empty if it can."""


RolloutResult: TypeAlias = (
    Joined | GroupsFinished | GaveBack | Leaving | Holds | Unreadable | WakeTask | RolloutCounts
)

REQUEST_LOG: Final = MessageSet[RolloutRequest](
    "the request log of a rollout task",
    {"confirm": Confirm, "generate": LeasedItems, "abort": Abort, "leave": Leave},
)
RESULT_LOG: Final = MessageSet[RolloutResult](
    "the result log of a rollout task",
    {
        "joined": Joined,
        "finished": GroupsFinished,
        "gave_back": GaveBack,
        "leaving": Leaving,
        "holds": Holds,
        "unreadable": Unreadable,
        "hears": WakeTask,
        "counts": RolloutCounts,
    },
)
