"""Scenarios: the history, with two masters, a command line and readers."""

from __future__ import annotations

from pathlib import Path

from slurmrl.errors import SlotTakenError, StaleIncarnationError, TrialEndedError, UsageError
from slurmrl.run.history.slots import History, Kind, Record
from slurmrl.run.history.state import begin, end, fold, resume
from tests.support.chaos.schedule import Event, Scenario, ViolationError
from tests.support.chaos.stepping import Note

REFUSED = (StaleIncarnationError, TrialEndedError, UsageError)


def _won(note: Note, record: Record) -> None:
    note(
        event="won",
        slot=record.slot,
        kind=record.kind,
        incarnation=record.incarnation,
        data=record.data,
    )


def master(folder: Path, me: int, note: Note) -> None:
    try:
        writer = begin(History(folder), {"by": me})
        note(event="began", incarnation=writer.incarnation, by=me)
        for step in range(1, 4):
            data = {"step": step, "directory": f"step-{step}.{writer.incarnation}", "by": me}
            _won(note, writer.append(Kind.COMMIT, data))
        _won(note, writer.append(Kind.FINISHED, {"step": 3, "by": me}))
    except REFUSED as error:
        note(event="refused", error=type(error).__name__)


def command(folder: Path, me: int, note: Note) -> None:
    for _ in range(2):
        for act in (
            lambda: end(History(folder), Kind.CANCELLED, {"by": me}),
            lambda: resume(History(folder), {"by": me}),
        ):
            try:
                _won(note, act())
            except REFUSED as error:
                note(event="refused", error=type(error).__name__)


def appender(folder: Path, me: int, note: Note) -> None:
    """Append to the log. A writer that loses a slot reads the log again."""
    history, done = History(folder), 0
    while done < 3:
        records = history.read()
        data = {"by": me, "step": done, "directory": f"step-{done}"}
        try:
            record = history.append(Kind.EXPORT, 0, data, after=len(records) - 1)
        except SlotTakenError:
            continue
        _won(note, record)
        done += 1


def reader(folder: Path, me: int, note: Note) -> None:
    for _ in range(4):
        note(event="read")
        records = History(folder).read()
        note(event="saw", records=[_shown(record) for record in records])


def _shown(record: Record) -> list[object]:
    return [record.slot, record.kind.value, record.data.get("by"), record.incarnation]


def check_history(folder: Path, events: list[Event]) -> list[Record]:
    """Check that one sequence has all acknowledged records, and that readers saw prefixes of it."""
    records = History(folder).read()
    shown = [_shown(record) for record in records]
    won: dict[int, int] = {}
    acknowledged = -1
    least: dict[int, int] = {}
    for event in events:
        kind, actor = event.get("event"), event["actor"]
        if kind == "won":
            slot = event["slot"]
            if won.setdefault(slot, actor) != actor:
                raise ViolationError(f"slot {slot} has two winners: {actor} and {won[slot]}")
            expected = [slot, event["kind"], event["data"].get("by"), event["incarnation"]]
            if slot >= len(records) or shown[slot] != expected:
                raise ViolationError(f"acknowledged {expected}, but slots are {shown}")
            acknowledged = max(acknowledged, slot)
        elif kind == "began":
            begins = [
                (record.incarnation, record.data.get("by"))
                for record in records
                if record.kind is Kind.BEGIN
            ]
            if begins.count((event["incarnation"], event["by"])) != 1:
                raise ViolationError(f"began {event}, but begins are {begins}")
        elif kind == "read":
            least[actor] = acknowledged + 1
        elif kind == "saw":
            seen = event["records"]
            if seen != shown[: len(seen)] or len(seen) < least[actor]:
                raise ViolationError(f"saw {seen}, at least {least[actor]} of {shown}")
    return records


def check_state(folder: Path, events: list[Event]) -> None:
    """Check that no record follows a newer incarnation or an end."""
    records = check_history(folder, events)
    fold(records)
    ended = False
    for record in records:
        if ended and record.kind is not Kind.RESUME:
            raise ViolationError(f"{record.kind} in slot {record.slot} stands after an end")
        ended = record.kind.is_end


def _check_bare(folder: Path, events: list[Event]) -> None:
    records = check_history(folder, events)
    numbers = [(record.data["by"], record.data["step"]) for record in records]
    if len(set(numbers)) != len(numbers):
        raise ViolationError(f"an append stands twice: {numbers}")


def _nothing(folder: Path) -> None:
    pass


SCENARIOS = (
    Scenario("history", _nothing, (master, master, command, reader), check_state, master),
    Scenario("history-append", _nothing, (appender, appender, reader), _check_bare, appender),
)
