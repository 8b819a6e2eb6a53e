"""Safe appending to the history: by incarnations, which newer ones fence off, and by commands.

Why it is safe: slots are won one by one, and a writer of slot n + 1 has read all slots up to n.
So a record that an incarnation wins precedes any newer BEGIN and any end that it has not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slurmrl.errors import (
    SlotTakenError,
    StaleIncarnationError,
    TrialEndedError,
    UsageError,
    WaitTimeoutError,
)
from slurmrl.run.history.log import History
from slurmrl.run.history.record import Kind, Record
from slurmrl.run.history.state import TrialState, fold

TRIES = 100
"""Slots lost in a row before giving up; each loss means progress of another writer."""


class IncarnationWriter:
    """Appends on behalf of one incarnation, until a newer one has begun or the trial has ended."""

    def __init__(self, history: History, incarnation: int) -> None:
        self.incarnation = incarnation
        self._history = history

    def append(self, kind: Kind, data: dict[str, Any]) -> Record:
        """Append a record.

        Raises StaleIncarnationError or TrialEndedError (nothing was appended, nor ever will be),
        EnvironmentFailure (the record may or may not be there).
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
    judge: Callable[[list[Record]], dict[str, Any] | None] = lambda records: None,
) -> IncarnationWriter:
    """Begin a new incarnation; ``data`` may be computed from the state that it begins on.

    Raises TrialEndedError if the trial has ended.

    ``judge`` gets all previous records. If it returns data for a FAILED record, the trial ends with
    that instead, and TrialEndedError is raised. No record can come between those that it saw and
    the one that is written.
    """

    def next_record(records: list[Record]) -> tuple[Kind, int, dict[str, Any]]:
        state = fold(records)
        _refuse_ended(state)
        verdict = judge(records)
        if verdict is not None:
            return Kind.FAILED, state.incarnation, verdict
        return Kind.BEGIN, state.incarnation + 1, data(state) if callable(data) else data

    record = _win(history, next_record)
    if record.kind is Kind.FAILED:
        raise TrialEndedError(f"the trial has failed: {record.data.get('reason')}")
    return IncarnationWriter(history, record.incarnation)


def end(history: History, kind: Kind, data: dict[str, Any]) -> Record:
    """End the trial by a command (`IncarnationWriter.append` is for the master).

    Raises TrialEndedError if it has ended already.
    """
    if not kind.is_end:
        raise UsageError(f"'{kind}' does not end a trial")

    def current(state: TrialState) -> int:
        _refuse_ended(state)
        return state.incarnation

    return _append(history, kind, data, current)


def resume(history: History, data: dict[str, Any]) -> Record:
    """Lift the end of a trial. Raises UsageError if the trial has not ended."""

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
    """Append the kind, incarnation and data that ``decide`` returns for the previous records."""
    known = 0
    for _ in range(TRIES):
        records = history.read(at_least=known)
        kind, incarnation, data = decide(records)
        try:
            return history.append(kind, incarnation, data, after=len(records) - 1)
        except SlotTakenError as taken:
            known = taken.args[0] + 1
    raise WaitTimeoutError(f"lost {TRIES} history slots in a row to other writers")


def _refuse_ended(state: TrialState) -> None:
    if state.end is not None:
        raise TrialEndedError(f"the trial {_ending(state)}")


def _ending(state: TrialState) -> str:
    if state.end is None:
        return "has ended and was resumed"
    reason = state.end.data.get("reason")
    return f"has ended: {state.end.kind}{f', {reason}' if reason else ''}"
