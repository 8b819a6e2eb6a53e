"""Explanation of who waits for whom, from the progress that ranks report. Pure functions.

A **row** is the progress of one rank (a JSON object): ``rank``, ``call``, ``step``, ``phase``,
``part``, ``parts``, ``since_s``, ``collective`` (``name``, ``number``, ``group``, ``ranks``,
``since_s``) or null, ``silent_s`` (0 for a rank that gives signs of life), and optionally
``frame``, its place in the code, and ``world``, if that is not the trainers'. A **group** is such
an object for ranks of one world that do the same: ``ranks`` (``"0-2,5"``) in place of ``rank``, and
the largest of their ages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurmrl.monitor.words import age, plain

Row = Mapping[str, Any]
Group = dict[str, Any]

MOST_GROUPS = 50
"""Most groups to report, the first by rank."""


def grouped(rows: Iterable[Row]) -> list[Group]:
    """Return the groups, those of the trainers first, in the order of their first ranks."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(_kind(row), []).append(row)
    groups = [_together(alike) for alike in found.values()]
    return sorted(groups, key=_place)[:MOST_GROUPS]


def _place(group: Group) -> tuple[str, int]:
    return group.get("world", ""), _first(group["ranks"])


def _kind(row: Row) -> tuple[Any, ...]:
    collective = row.get("collective") or {}
    doing = (row.get(key) for key in ("world", "call", "step", "phase", "part", "parts", "frame"))
    where = (collective.get(key) for key in ("name", "number", "group"))
    return (*doing, *where, _span(collective.get("ranks", ())), bool(row.get("silent_s")))


def _together(alike: Sequence[Row]) -> Group:
    group = {key: value for key, value in alike[0].items() if key != "rank"}
    group["ranks"] = _span(int(row["rank"]) for row in alike)
    group["since_s"] = _oldest(alike, "since_s")
    group["silent_s"] = _oldest(alike, "silent_s")
    if collective := alike[0].get("collective"):
        told = [row["collective"] for row in alike]
        span = _span(collective.get("ranks", ()))
        group["collective"] = {**collective, "ranks": span, "since_s": _oldest(told, "since_s")}
    return group


def _oldest(rows: Iterable[Row], key: str) -> float:
    return round(max(float(row.get(key) or 0.0) for row in rows), 1)


def explain(groups: Sequence[Group]) -> str:
    """Return one sentence about the trainers, empty if no rank waits or is late.

    ``ranks 0-2 have waited 140 s in actor_train (all_reduce #1841) for rank 3, which has been in
    reward_inf for 140 s``
    """
    trainers = [one for one in groups if "world" not in one]
    waiting = [one for one in trainers if one.get("collective") and not one.get("silent_s")]
    others = [one for one in trainers if one not in waiting]
    late = [one for one in others if one.get("call") or one.get("silent_s")] or others
    if not waiting:
        return "; ".join(f"{_who(one)} {_has_been(one)}" for one in late)
    awaited = [one for one in others if any(_is_in(one, group) for group in waiting)]
    if awaited:
        which = " and ".join(f"{_who(one)}, which {_has_been(one)}" for one in awaited)
        return f"{' and '.join(map(_waits, waiting))} for {which}"
    text = " and ".join(map(_waits, waiting))
    if len({_collective_key(one) for one in waiting}) > 1:
        return f"{text}: these are different collectives, so they wait for each other"
    missing = _missing(waiting)
    return f"{text} for {missing}" if missing else f"{text}, which all of its ranks have entered"


def _collective_key(group: Group) -> tuple[Any, ...]:
    return tuple(group["collective"].get(key) for key in ("name", "number", "ranks"))


def _missing(waiting: Sequence[Group]) -> str:
    """Return the ranks of the collective that have reported nothing."""
    there = {rank for one in waiting for rank in _ranks(one["ranks"])}
    absent = {rank for one in waiting for rank in _ranks(one["collective"]["ranks"])} - there
    if not absent:
        return ""
    return f"{_named(_span(absent))}, which reported nothing"


def _is_in(other: Group, waiting: Group) -> bool:
    """Whether one of these ranks belongs to the group of that collective."""
    ranks = waiting["collective"].get("ranks", "")
    return not ranks or bool(_ranks(ranks) & _ranks(other["ranks"]))


def _who(group: Group) -> str:
    return _named(group["ranks"]) + (f" of {group['world']}" if "world" in group else "")


def _named(span: str) -> str:
    return f"rank{'' if span.isdecimal() else 's'} {span}"


def _waits(group: Group) -> str:
    collective = group["collective"]
    have = "has" if group["ranks"].isdecimal() else "have"
    inside = f"{plain(str(collective['name']))} #{collective['number']}"
    if group.get("parts"):
        inside += f", micro-batch {group['part']} of {group['parts']}"
    waited = age(collective.get("since_s") or 0.0)
    return f"{_who(group)} {have} waited {waited} in {_call(group)} ({inside})"


def _has_been(group: Group) -> str:
    have = "has" if group["ranks"].isdecimal() else "have"
    place = _call(group)
    detail = _detail(group)
    if group.get("silent_s"):
        silent = f"{have} given no sign of life for {age(group['silent_s'])}"
        return f"{silent} (last in {place}{detail})" if place else silent
    since = age(group.get("since_s") or 0.0)
    if not place:
        return f"{have} been waiting for the master's next message for {since}"
    return f"{have} been in {place} for {since}{detail}"


def _call(group: Group) -> str:
    return plain(str(group.get("call") or ""))


def _detail(group: Group) -> str:
    """`` (forward, micro-batch 2 of 8, paced_reward.py:44 in __call__)``"""
    parts = [plain(str(group.get("phase") or ""))]
    if group.get("parts"):
        parts.append(f"micro-batch {group['part']} of {group['parts']}")
    parts.append(plain(str(group.get("frame") or "")))
    text = ", ".join(filter(None, parts))
    return f" ({text})" if text else ""


def describe(row: Row) -> str:
    """Return what one rank does, on one line."""
    [group] = grouped([row])
    if group.get("collective") and not group.get("silent_s"):
        return _waits(group).removeprefix(f"{_who(group)} ")
    return _has_been(group)


def _span(ranks: Iterable[int]) -> str:
    """``0-2,5``"""
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
