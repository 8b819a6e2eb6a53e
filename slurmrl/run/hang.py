"""Explanation of the waits between ranks, from the progress that the ranks report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from slurmrl.display.terminal import age, plain
from slurmrl.fsio.documents import COUNT, SECONDS, FieldType
from slurmrl.run.reports import TRAINERS

COMPILING = "compiling the operators of slurmrl, once for this cache"
"""The phase of a rank that compiles the operators, or waits while another process does so."""
MOST_GROUPS = 50
"""Maximum number of groups in a report. The report shows the groups with the lowest ranks."""
_PATTERN = re.compile(r"(\d{1,7}(-\d{1,7})?(,\d{1,7}(-\d{1,7})?)*)?")
SPANS = FieldType(
    "ranks such as 0-2,5",
    lambda value: isinstance(value, str) and _PATTERN.fullmatch(value) is not None,
)


@dataclass(frozen=True, kw_only=True)
class _Collective:
    name: str = ""
    number: int | None = None
    """Number of the collective in its group; None for a message from one rank to another."""
    group: str = ""
    """Torch's name of the group."""
    since_s: Annotated[float, SECONDS] = 0.0
    """Seconds since the collective began."""


@dataclass(frozen=True, kw_only=True)
class PendingCollective(_Collective):
    """The collective that a rank has entered, or the message that it waits for."""

    ranks: tuple[Annotated[int, COUNT], ...] = ()
    """The ranks of the group (empty if unknown), or the sender of a message."""


@dataclass(frozen=True, kw_only=True)
class SharedCollective(_Collective):
    """The collective that several ranks have entered."""

    ranks: Annotated[str, SPANS] = ""


@dataclass(frozen=True, kw_only=True)
class _Progress:
    world: str = TRAINERS
    call: str = ""
    """Name of the call; empty for a rank that waits for the master's next message."""
    step: int | None = None
    phase: str = ""
    part: Annotated[int, COUNT] = 0
    """Number of the micro-batch, from 1; 0 outside of micro-batches."""
    parts: Annotated[int, COUNT] = 0
    since_s: Annotated[float, SECONDS] = 0.0
    """Seconds since the call began."""
    silent_s: Annotated[float, SECONDS] = 0.0
    """Seconds without a heartbeat; 0 for a rank that sends heartbeats."""
    frame: str = ""
    """Place in the code; empty if no stacks were collected."""


@dataclass(frozen=True, kw_only=True)
class RankProgress(_Progress):
    """The activity of one rank."""

    rank: Annotated[int, COUNT]
    collective: PendingCollective | None = None


@dataclass(frozen=True, kw_only=True)
class GroupProgress(_Progress):
    """Common activity of several ranks of one world. Times are the maximum over the ranks."""

    ranks: Annotated[str, SPANS]
    collective: SharedCollective | None = None

    def document(self) -> dict[str, Any]:
        """Return the object that represents this activity in the status."""
        values = asdict(self)
        left_out = [("world", TRAINERS), ("frame", "")]
        return {name: value for name, value in values.items() if (name, value) not in left_out}


@dataclass(frozen=True, kw_only=True)
class LeaseNote:
    """The note that an agent writes after the counter of its lease."""

    incarnation: Annotated[int, COUNT]
    """The incarnation that the agent serves; 0 for none."""
    doing: tuple[RankProgress, ...] = ()


def grouped(rows: Iterable[RankProgress]) -> list[GroupProgress]:
    """Group ranks by activity. Sort groups by world, trainers first, and by their lowest rank."""
    found: dict[RankProgress, list[RankProgress]] = {}
    for row in rows:
        found.setdefault(_kind(row), []).append(row)
    groups = [_together(alike) for alike in found.values()]
    return sorted(groups, key=_place)[:MOST_GROUPS]


def _place(group: GroupProgress) -> tuple[bool, str, int]:
    return group.world != TRAINERS, group.world, _first(group.ranks)


def _kind(row: RankProgress) -> RankProgress:
    """Return the key that is equal for ranks with the same activity."""
    collective = row.collective and replace(row.collective, since_s=0.0)
    silent_s = 1.0 if row.silent_s else 0.0
    return replace(row, rank=0, since_s=0.0, silent_s=silent_s, collective=collective)


def _together(alike: Sequence[RankProgress]) -> GroupProgress:
    first = alike[0]
    collectives = [row.collective for row in alike if row.collective is not None]
    shared = None
    if first.collective is not None:
        shared = SharedCollective(
            name=first.collective.name,
            number=first.collective.number,
            group=first.collective.group,
            ranks=_span(first.collective.ranks),
            since_s=_oldest(collective.since_s for collective in collectives),
        )
    return GroupProgress(
        world=first.world,
        ranks=_span(row.rank for row in alike),
        call=first.call,
        step=first.step,
        phase=first.phase,
        part=first.part,
        parts=first.parts,
        since_s=_oldest(row.since_s for row in alike),
        silent_s=_oldest(row.silent_s for row in alike),
        frame=first.frame,
        collective=shared,
    )


def _oldest(ages_s: Iterable[float]) -> float:
    return round(max(ages_s), 1)


def explain(groups: Sequence[GroupProgress]) -> str:
    """Return one sentence about the trainers. Return "" if no rank waits or is late.

    ``ranks 0-2 have waited 140 s in actor_train (all_reduce #1841) for rank 3, which has been in
    reward_inf for 140 s``
    """
    trainers = [group for group in groups if group.world == TRAINERS]
    waiting = [(one, one.collective) for one in trainers if one.collective and not one.silent_s]
    others = [one for one in trainers if not one.collective or one.silent_s]
    late = [one for one in others if one.call or one.silent_s] or others
    if not waiting:
        return "; ".join(f"{_who(one)} {_has_been(one)}" for one in late)
    collectives = [collective for _, collective in waiting]
    awaited = [one for one in others if any(_is_in(one, entered) for entered in collectives)]
    text = " and ".join(f"{_who(one)} {_has_waited(one, entered)}" for one, entered in waiting)
    if awaited:
        which = " and ".join(f"{_who(one)}, which {_has_been(one)}" for one in awaited)
        return f"{text} for {which}"
    if len({(entered.name, entered.number, entered.ranks) for entered in collectives}) > 1:
        return f"{text}: these are different operations, so they wait for each other"
    missing = _missing(waiting)
    return f"{text} for {missing}" if missing else f"{text}, which all of its ranks have entered"


def _missing(waiting: Iterable[tuple[GroupProgress, SharedCollective]]) -> str:
    """Return a phrase about ranks of the collective that did not report; empty if all did."""
    there, members = set[int](), set[int]()
    for group, collective in waiting:
        there |= _ranks(group.ranks)
        members |= _ranks(collective.ranks)
    absent = members - there
    return f"{_named(_span(absent))}, which reported nothing" if absent else ""


def _is_in(other: GroupProgress, collective: SharedCollective) -> bool:
    """Return whether the collective needs one of these ranks."""
    return not collective.ranks or bool(_ranks(collective.ranks) & _ranks(other.ranks))


def _who(group: GroupProgress) -> str:
    return _named(group.ranks) + ("" if group.world == TRAINERS else f" of {group.world}")


def _named(span: str) -> str:
    return f"rank{'' if span.isdecimal() else 's'} {span}"


def _has_waited(group: GroupProgress, collective: SharedCollective) -> str:
    number = "" if collective.number is None else f" #{collective.number}"
    inside = f"{plain(collective.name)}{number}{_microbatch(group)}"
    return f"{_have(group)} waited {age(collective.since_s)} in {plain(group.call)} ({inside})"


def _has_been(group: GroupProgress) -> str:
    have, place, detail = _have(group), plain(group.call), _detail(group)
    if group.silent_s:
        silent = f"{have} sent no heartbeat for {age(group.silent_s)}"
        return f"{silent} (last in {place}{detail})" if place else silent
    since = age(group.since_s)
    if not place:
        return f"{have} been waiting for the master's next message for {since}"
    return f"{have} been in {place} for {since}{detail}"


def _have(group: GroupProgress) -> str:
    return "has" if group.ranks.isdecimal() else "have"


def _microbatch(group: GroupProgress) -> str:
    return f", micro-batch {group.part} of {group.parts}" if group.parts else ""


def _detail(group: GroupProgress) -> str:
    """Return details, such as ``(forward, micro-batch 2 of 8, paced_reward.py:44 in __call__)``."""
    parts = [plain(group.phase), _microbatch(group).removeprefix(", "), plain(group.frame)]
    text = ", ".join(filter(None, parts))
    return f" ({text})" if text else ""


def describe(row: RankProgress) -> str:
    """Return the activity of one rank, on one line."""
    [group] = grouped([row])
    if group.collective is not None and not group.silent_s:
        return _has_waited(group, group.collective)
    return _has_been(group)


def _span(ranks: Iterable[int]) -> str:
    """Format ranks as ranges, for example ``0-2,5``."""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _ranks(span: str) -> set[int]:
    found: set[int] = set()
    for part in filter(None, span.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _first(span: str) -> int:
    return int(span.partition(",")[0].partition("-")[0])
