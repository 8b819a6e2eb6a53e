"""The messages between the master and the attempts of rollout tasks.

Requests come in a log for each incarnation and attempt, results in one log of the attempt, which
later incarnations go on reading where the last commit stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, TypeAlias

from slurmrl.data.ledger import LEASE, StoredGroup
from slurmrl.fsio.documents import NUMBER, SECONDS, SIZE
from slurmrl.run.channel.bell import BellAddress
from slurmrl.run.reports import Identity
from slurmrl.tensors.weights.format import VERSION
from slurmrl.workers.messages import MessageSet

# -- master to a task, in the request log ----------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RequestedItem:
    """An item, and the row of the dataset that it is; the task reads the dataset itself."""

    item: Annotated[int, SIZE]
    epoch: Annotated[int, SIZE]
    index: Annotated[int, SIZE]


@dataclass(frozen=True, kw_only=True)
class GenerateItems:
    """Make the completions of each item. The plan has their number and the sampling options."""

    lease: Annotated[str, LEASE]
    items: tuple[RequestedItem, ...]
    oldest: Annotated[str, VERSION]
    """Tokens of an older weight version are of no use."""


@dataclass(frozen=True, kw_only=True)
class Confirm:
    """The first message of a log: the knowledge of this incarnation's master about the attempt.

    Other leases are over: their unfinished items are not wanted any more.
    """

    leases: tuple[GenerateItems, ...] = ()
    """Those that still hold, with the items that the master has no result of. The request may have
    been made by an earlier incarnation, whose log the task need not have read."""
    bell: BellAddress | None = None
    """To ring when results are recorded."""


@dataclass(frozen=True, kw_only=True)
class Abort:
    """These items are not wanted any more if unfinished; no answer is expected."""

    lease: Annotated[str, LEASE]
    items: tuple[Annotated[int, SIZE], ...]


@dataclass(frozen=True, kw_only=True)
class Leave:
    """Finish or give back all items, and exit."""

    within_s: Annotated[float, SECONDS]


RolloutRequest: TypeAlias = Confirm | GenerateItems | Abort | Leave


# -- a task to the masters, in its result log ------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The first message of a log: the task's agent, whose lease shows that it lives."""

    agent: Identity


@dataclass(frozen=True, kw_only=True)
class GroupsFinished:
    """These groups are on disk."""

    groups: tuple[StoredGroup, ...]


@dataclass(frozen=True, kw_only=True)
class GaveBack:
    """These items are not going to be finished under the lease: the task retires."""

    lease: Annotated[str, LEASE]
    items: tuple[Annotated[int, SIZE], ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """The task takes no more requests and finishes or gives back its items."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Holds:
    """The weight version that samples the next token."""

    version: Annotated[str, VERSION]


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """A published version that the task cannot read. It tries again at the next publication."""

    version: Annotated[str, VERSION]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Hears:
    """The task's bell, to ring when there are requests or weights. Said to each incarnation."""

    bell: BellAddress


COUNTS_S: Final = 30.0
"""An attempt says its counts this often, whatever it does."""


@dataclass(frozen=True, kw_only=True)
class RolloutCounts:
    """Sums since the attempt began, such as ``tokens``, and the current problem."""

    counts: Mapping[str, Annotated[float, NUMBER]] = field(default_factory=dict)
    problem: str = ""
    """Reason why the task cannot take newer weights; empty if it can."""


RolloutResult: TypeAlias = (
    Joined | GroupsFinished | GaveBack | Leaving | Holds | Unreadable | Hears | RolloutCounts
)

REQUEST_LOG: Final = MessageSet[RolloutRequest](
    "the request log of a rollout task",
    {"confirm": Confirm, "generate": GenerateItems, "abort": Abort, "leave": Leave},
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
        "hears": Hears,
        "counts": RolloutCounts,
    },
)
