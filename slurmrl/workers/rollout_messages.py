"""The messages between the master and the attempts of rollout tasks.

Each incarnation has a request log for each attempt. Each attempt has one result log. A later
incarnation reads the log from the position in the last commit.
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

# -- messages from the master to a task, in the request log ----------------------------------


@dataclass(frozen=True, kw_only=True)
class Confirm:
    """The first message of a request log, with all valid leases of the attempt.

    Other leases have ended, and the task drops their unfinished items.
    """

    leases: tuple[LeasedItems, ...] = ()
    """The valid leases, with the items for which the master has no result. Some leases may come
    from requests of an earlier incarnation that the task has not read."""
    wakeups: WakeupAddress | None = None
    """Address to which the task sends a wake-up when it has recorded results."""
    stop_token_ids: tuple[Annotated[int, SIZE], ...] = ()
    """The tokens that end a completion in the trainers; empty in old logs."""


@dataclass(frozen=True, kw_only=True)
class Abort:
    """Drop these items unless they are finished. The task sends no answer."""

    lease: Annotated[str, LEASE]
    items: tuple[Annotated[int, SIZE], ...]


@dataclass(frozen=True, kw_only=True)
class Leave:
    """Finish all items or return them, and exit within ``within_s`` seconds."""

    within_s: Annotated[float, SECONDS]


RolloutRequest: TypeAlias = Confirm | LeasedItems | Abort | Leave


# -- messages from a task to the masters, in its result log ----------------------------------


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The first message of a result log: the agent whose lease shows that the task is alive."""

    agent: Identity


@dataclass(frozen=True, kw_only=True)
class GroupsFinished:
    """The task has written the samples of these groups to disk."""

    groups: tuple[StoredGroup, ...]


@dataclass(frozen=True, kw_only=True)
class GaveBack:
    """The task returns these items unfinished, because it retires."""

    lease: Annotated[str, LEASE]
    items: tuple[Annotated[int, SIZE], ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """The task has finished or returned all its items and exits."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Holds:
    """The task has loaded a weight version, which will sample the next token."""

    version: Annotated[str, VERSION]


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """The task cannot read a published version. The task tries again after the next publication."""

    version: Annotated[str, VERSION]
    reason: str


@dataclass(frozen=True, kw_only=True)
class WakeTask:
    """The task's address for wake-ups about requests and weights, for a new incarnation."""

    wakeups: WakeupAddress | None = None  # Old logs have the obsolete field `bell` instead.


COUNTS_S: Final = 30.0
"""Seconds between two reports of an attempt's counts, even if it is idle."""


@dataclass(frozen=True, kw_only=True)
class RolloutCounts:
    """Counters since the attempt began, such as ``tokens``, and the current problem."""

    counts: Mapping[str, Annotated[float, NUMBER]] = field(default_factory=dict)
    problem: str = ""
    """Reason why the task cannot read newer weights; empty without a problem."""


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
