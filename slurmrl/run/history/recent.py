"""A quick view of the end of a history, which reads few records however many there are.

Decisions fold the whole history (`state`); this view is for display, where every refresh of
``slurmrl status`` would otherwise read thousands of files. It relies on two invariants:
incarnations do not interleave, so BEGINs are found by bisection; and after an end, a COMMIT or a
BEGIN requires a RESUME first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.run.history.log import History
from slurmrl.run.history.record import Kind, Record
from slurmrl.run.history.state import Commit, Export, place

BACK = 64
"""How many slots before a BEGIN are searched for the previous commit."""


@dataclass(frozen=True)
class Begun:
    """One incarnation as the history describes it."""

    number: int
    time: float
    data: dict[str, Any]
    """Data of its BEGIN."""
    base: int | None
    """Step of the last commit before it; None if there was none, or only far back."""
    commit: Record | None
    """Its last commit."""
    end: Record | None
    """The first end of the trial between this BEGIN and the next, whether resumed since or not."""


@dataclass(frozen=True)
class Recent:
    """The end of a history; fields have the same meaning as in `TrialState`."""

    incarnation: int = 0
    last_commit: Commit | None = None
    end: Record | None = None
    export: Export | None = None
    """The newest."""
    begun: tuple[Begun, ...] = field(default=())
    """The newest incarnations, oldest first."""


def recent(
    directory: Path, *, incarnations: int = 1, exports: bool = True, calls: SystemCalls = REAL
) -> Recent:
    """Read the end of a history.

    Without ``exports`` the search for the newest export is skipped, which reads all records if
    there is none. Raises as `History.read`.
    """
    history = History(directory, calls=calls)
    count = history.count()
    if count == 0:
        return Recent()
    newest = history.record(count - 1).incarnation
    numbers = range(max(1, newest - incarnations + 1), newest + 1)
    return Recent(
        newest,
        _last_commit(history, count),
        _end(history, count),
        _newest_export(history, count) if exports else None,
        tuple(_begun(history, number, count) for number in numbers),
    )


def begin_of(directory: Path, incarnation: int, *, calls: SystemCalls = REAL) -> Record | None:
    """Return the BEGIN of an incarnation; None if it has not begun. Raises as `History.read`."""
    history = History(directory, calls=calls)
    count = history.count()
    slot = _slot_of(history, incarnation, count)
    record = history.record(slot) if slot < count else None
    return record if record is not None and record.incarnation == incarnation else None


def _backwards(history: History, before: int, stop: int = 0) -> Iterator[Record]:
    for slot in range(before - 1, max(stop, 0) - 1, -1):
        yield history.record(slot)


def _last_commit(history: History, count: int) -> Commit | None:
    deleted = set()
    for record in _backwards(history, count):
        if record.kind is Kind.DELETE:
            deleted.add(place(record)[1])
        elif record.kind is Kind.COMMIT:
            step, directory = place(record)
            if directory not in deleted:
                return Commit(step, directory, record.incarnation, record.data)
    return None


def _end(history: History, count: int) -> Record | None:
    for record in _backwards(history, count):
        if record.kind.is_end:
            return record
        if record.kind in (Kind.BEGIN, Kind.COMMIT, Kind.RESUME):
            return None
    return None


def _ended(history: History, before: int) -> Record | None:
    """Return the first end after an incarnation's last BEGIN or COMMIT, whatever followed."""
    first = None
    for record in _backwards(history, before):
        if record.kind.is_end:
            first = record
        if record.kind in (Kind.BEGIN, Kind.COMMIT):
            break
    return first


def _newest_export(history: History, count: int) -> Export | None:
    for record in _backwards(history, count):
        if record.kind is Kind.EXPORT:
            return Export(*place(record), record.incarnation)
    return None


def _begun(history: History, number: int, count: int) -> Begun:
    begin = history.record(_slot_of(history, number, count))
    after = _slot_of(history, number + 1, count)
    commit = _commit_before(history, after, begin.slot)
    base = _commit_before(history, begin.slot, begin.slot - BACK)
    step = None if base is None else place(base)[0]
    return Begun(number, begin.time, begin.data, step, commit, _ended(history, after))


def _slot_of(history: History, incarnation: int, count: int) -> int:
    """Return the slot of an incarnation's BEGIN; ``count`` if it has not begun."""
    return bisect_left(range(count), incarnation, key=lambda n: history.record(n).incarnation)


def _commit_before(history: History, slot: int, stop: int) -> Record | None:
    commits = (record for record in _backwards(history, slot, stop) if record.kind is Kind.COMMIT)
    return next(commits, None)
