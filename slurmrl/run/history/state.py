"""The state of a trial, from the records of its history, and safe appending to the history.

Decisions use the whole history. For display, `recent` reads only its end, because every refresh of
``slurmrl status`` would otherwise read thousands of files. `recent` relies on two invariants:

- The records of an incarnation have no records of another incarnation between them, so bisection
  finds each BEGIN.
- After an end, a COMMIT or a BEGIN requires a RESUME first.

Incarnations and commands append records. A newer incarnation excludes older incarnations: no
incarnation appends after a newer BEGIN, because a writer of slot n + 1 has read all slots up to n.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmrl.errors import (
    CorruptFileError,
    SlotTakenError,
    StaleIncarnationError,
    TrialEndedError,
    UsageError,
    WaitTimeoutError,
)
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.run.history.slots import History, Kind, Record


@dataclass(frozen=True)
class Commit:
    """A commit that was not deleted."""

    step: int
    directory: str
    """Name of its folder in ``checkpoints/``."""
    incarnation: int
    data: dict[str, Any] = field(default_factory=dict)
    """Data of the COMMIT record."""


@dataclass(frozen=True)
class Export:
    """A model in Hugging Face form."""

    step: int
    directory: str
    """Name of its folder in ``export/``."""
    incarnation: int


@dataclass(frozen=True)
class TrialState:
    incarnation: int = 0
    """The newest incarnation; 0 before the first."""
    commits: tuple[Commit, ...] = ()
    """Commits that were not deleted, sorted by step."""
    last_commit: Commit | None = None
    """The newest commit, from which the next incarnation resumes."""
    end: Record | None = None
    """The end of the trial; None if the trial was resumed afterwards."""
    base: str | None = None
    """Directory of the commit from which the newest incarnation resumed; None for a fresh start."""
    bases: Mapping[int, Commit] = field(default_factory=dict)
    """Mapping from incarnation to the commit from which it resumed; fresh starts are absent."""
    begins_without_commit: int = 0
    """Number of incarnations that began since the last commit or resume."""
    exports: tuple[Export, ...] = ()
    """All exports, in order of creation."""
    begin_data: dict[str, Any] = field(default_factory=dict)
    """Data of the newest BEGIN."""
    begin_slot: int = -1
    """Slot of the newest BEGIN."""
    ended_slot: int = -1
    """Slot of the newest end, even if the trial was resumed afterwards."""

    @property
    def last_step(self) -> int:
        """Step of `last_commit`; -1 without a commit."""
        return self.last_commit.step if self.last_commit is not None else -1


def fold(records: Iterable[Record]) -> TrialState:
    """Compute the state from the records. Raises CorruptFileError if they contradict each other."""
    fields: dict[str, Any] = {}
    commits: dict[str, Commit] = {}
    incarnation = 0
    for record in records:
        begins = record.kind is Kind.BEGIN
        if record.incarnation != incarnation + begins:
            raise CorruptFileError(f"history slot {record.slot}: {record} has a wrong incarnation")
        incarnation = record.incarnation
        _apply(record, fields, commits)
    return TrialState(
        incarnation=incarnation,
        commits=tuple(sorted(commits.values(), key=lambda commit: commit.step)),
        last_commit=next(reversed(commits.values()), None),
        **fields,
    )


def _apply(record: Record, fields: dict[str, Any], commits: dict[str, Commit]) -> None:
    begins = fields.get("begins_without_commit", 0)
    if record.kind is Kind.BEGIN:
        base = record.data.get("base", next(reversed(commits), None))
        if base in commits:
            fields.setdefault("bases", {})[record.incarnation] = commits[base]
        fields.update(
            begins_without_commit=begins + 1,
            begin_data=record.data,
            begin_slot=record.slot,
            base=base,
        )
    elif record.kind is Kind.COMMIT:
        step, directory = place(record)
        commits.pop(directory, None)
        commits[directory] = Commit(step, directory, record.incarnation, record.data)
        fields.update(begins_without_commit=0)
    elif record.kind is Kind.DELETE:
        commits.pop(place(record)[1], None)
    elif record.kind is Kind.EXPORT:
        export = Export(*place(record), record.incarnation)
        fields.update(exports=(*fields.get("exports", ()), export))
    elif record.kind is Kind.RESUME:
        fields.update(end=None, begins_without_commit=0)
    else:
        fields.update(end=record, ended_slot=record.slot)


def place(record: Record) -> tuple[int, str]:
    """Return the step and the directory of a COMMIT, DELETE or EXPORT record."""
    return record.data["step"], record.data["directory"]


@dataclass(frozen=True)
class Lineage:
    """The last step that still counts, for each incarnation that led to the newest incarnation.

    The last step is None if all steps of the incarnation count.

    An incarnation repeats the steps after the commit from which it resumes, so there may be two
    versions of a step's weights. Results of an earlier incarnation for steps after its last commit
    no longer count.
    """

    last_steps: Mapping[int, int | None]

    @staticmethod
    def of(records: Iterable[Record]) -> Lineage:
        """Return the lineage that these records describe."""
        state = fold(records)
        newest, last_steps = state.incarnation, dict[int, int | None]({state.incarnation: None})
        while (base := state.bases.get(newest)) is not None:
            newest = base.incarnation
            last_steps[newest] = base.step
        return Lineage(last_steps)

    def has(self, step: int, incarnation: int) -> bool:
        """Return whether the newest weights derive from an incarnation's weights after a step."""
        if incarnation not in self.last_steps:
            return False
        last = self.last_steps[incarnation]
        return last is None or step <= last


BACK = 64
"""Number of slots before a BEGIN that are searched for the previous commit."""


@dataclass(frozen=True)
class Begun:
    """One incarnation as the history describes it."""

    number: int
    time: float
    data: dict[str, Any]
    """Data of its BEGIN."""
    base: int | None
    """Step of the last commit before the incarnation; None if there is none within `BACK` slots."""
    commit: Record | None
    """The incarnation's last commit."""
    end: Record | None
    """The first end of the trial before the next BEGIN, even if the trial was later resumed."""


@dataclass(frozen=True)
class Recent:
    """The newest part of a history. Fields have the same meaning as in `TrialState`."""

    incarnation: int = 0
    last_commit: Commit | None = None
    end: Record | None = None
    export: Export | None = None
    """The newest export."""
    begun: tuple[Begun, ...] = field(default=())
    """The newest incarnations, oldest first."""


def recent(
    directory: Path, *, incarnations: int = 1, exports: bool = True, calls: SystemCalls = REAL
) -> Recent:
    """Read the newest part of a history.

    Without ``exports``, do not search for the newest export, because the search reads all records
    if there is no export. Raises the errors of `History.read`.
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


def begin_of(directory: Path, incarnation: int) -> Record | None:
    """Return the BEGIN of an incarnation; None if it has not begun.

    Raises the errors of `History.read`.
    """
    history = History(directory)
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
    """Return the first end after an incarnation's last BEGIN or COMMIT, even before a resume."""
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


TRIES = 100
"""Number of slots in a row that other writers may take before this writer fails."""


class IncarnationWriter:
    """Appends for one incarnation, until a newer incarnation has begun or the trial has ended."""

    def __init__(self, history: History, incarnation: int) -> None:
        self.incarnation = incarnation
        self._history = history

    def append(self, kind: Kind, data: dict[str, Any]) -> Record:
        """Append a record.

        Raises:
            StaleIncarnationError: A newer incarnation has begun; nothing was appended.
            TrialEndedError: The trial has ended; nothing was appended.
            EnvironmentFailure: The record may or may not be there.
        """
        return _append(self._history, kind, data, self._permitted)

    def check(self) -> TrialState:
        """Return the current state. Raises StaleIncarnationError or TrialEndedError."""
        state = fold(self._history.read())
        self._permitted(state)
        return state

    def _permitted(self, state: TrialState) -> int:
        if state.incarnation != self.incarnation:
            raise StaleIncarnationError(
                f"incarnation {self.incarnation} must stop: {state.incarnation} is the newest"
            )
        if state.ended_slot > state.begin_slot:
            raise TrialEndedError(
                f"incarnation {self.incarnation} must stop: {_ending(state)} since it began"
            )
        return self.incarnation


def begin(
    history: History,
    data: dict[str, Any] | Callable[[TrialState], dict[str, Any]],
    futile: Callable[[list[Record]], dict[str, Any] | None] = lambda records: None,
) -> IncarnationWriter:
    """Begin a new incarnation. ``data`` may be computed from the state at that moment.

    ``futile`` gets all previous records, which the new record directly follows. If ``futile``
    returns data for a FAILED record, the trial ends with this record instead of a BEGIN.

    Raises TrialEndedError if the trial has ended or ends with this call.
    """

    def next_record(records: list[Record]) -> tuple[Kind, int, dict[str, Any]]:
        state = fold(records)
        _reject_ended(state)
        verdict = futile(records)
        if verdict is not None:
            return Kind.FAILED, state.incarnation, verdict
        return Kind.BEGIN, state.incarnation + 1, data(state) if callable(data) else data

    record = _win(history, next_record)
    if record.kind is Kind.FAILED:
        raise TrialEndedError(f"the trial has failed: {record.data.get('reason')}")
    return IncarnationWriter(history, record.incarnation)


def end(history: History, kind: Kind, data: dict[str, Any]) -> Record:
    """End the trial for a command. The master calls `IncarnationWriter.append` instead.

    Raises TrialEndedError if the trial has ended already.
    """
    if not kind.is_end:
        raise UsageError(f"'{kind}' does not end a trial")

    def current(state: TrialState) -> int:
        _reject_ended(state)
        return state.incarnation

    return _append(history, kind, data, current)


def resume(history: History, data: dict[str, Any]) -> Record:
    """Let an ended trial continue. Raises UsageError if the trial has not ended."""

    def current(state: TrialState) -> int:
        if state.end is None:
            raise UsageError("the trial has not ended: there is nothing to resume")
        return state.incarnation

    return _append(history, Kind.RESUME, data, current)


def _append(
    history: History, kind: Kind, data: dict[str, Any], permitted: Callable[[TrialState], int]
) -> Record:
    """Append after the last record. ``permitted`` checks the state and returns the incarnation."""
    return _win(history, lambda records: (kind, permitted(fold(records)), data))


def _win(
    history: History, decide: Callable[[list[Record]], tuple[Kind, int, dict[str, Any]]]
) -> Record:
    """Append the record (kind, incarnation, data) that ``decide`` derives from earlier records."""
    known = 0
    for _ in range(TRIES):
        records = history.read(at_least=known)
        kind, incarnation, data = decide(records)
        try:
            return history.append(kind, incarnation, data, after=len(records) - 1)
        except SlotTakenError as taken:
            known = taken.args[0] + 1
    raise WaitTimeoutError(
        f"could not append to the history: other writers took {TRIES} slots in a row; try again"
    )


def _reject_ended(state: TrialState) -> None:
    if state.end is not None:
        raise TrialEndedError(f"the trial {_ending(state)}")


def _ending(state: TrialState) -> str:
    if state.end is None:
        return "has ended and was resumed"
    reason = state.end.data.get("reason")
    return f"has ended: {state.end.kind}{f', {reason}' if reason else ''}"
