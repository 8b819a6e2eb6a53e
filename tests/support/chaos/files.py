"""Scenarios: exclusive create, replace, the name store, leases."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmrl.errors import NameExistsError, NameNotFoundError, SlurmrlError
from slurmrl.fsio import atomic
from slurmrl.name_resolve.store import NameStore
from slurmrl.run.lease import Lease, read_counter
from tests.support.chaos.linearizable import is_linearizable, operations
from tests.support.chaos.schedule import Event, Scenario, ViolationError
from tests.support.chaos.stepping import Actor, Note

PADDING = "x" * 5000


def pack(value: str) -> bytes:
    """Return content from which a partial write can be detected."""
    body = f"{value} {PADDING}"
    return f"{zlib.crc32(body.encode()):08x} {body}".encode()


def unpack(data: bytes) -> str:
    checksum, _, body = data.decode().partition(" ")
    if f"{zlib.crc32(body.encode()):08x}" != checksum:
        raise ViolationError(f"torn read of {len(data)} bytes: {data[:60]!r}")
    return body.split(" ")[0]


def _value(path: Path) -> str | None:
    try:
        return unpack(atomic.read(path))
    except FileNotFoundError:
        return None


class Recorder:
    """Records calls and their results; a call whose outcome is unknown never returns."""

    def __init__(self, note: Note) -> None:
        self._note = note

    def call(
        self, kind: str, key: str, action: Callable[[], Any], argument: str | None = None
    ) -> Any:
        self._note(event="call", kind=kind, key=key, argument=argument)
        result = action()
        self._note(event="return", result=result)
        return result


def check_keys(events: list[Event], last: Callable[[str], str | None]) -> None:
    """Check that every key's history is linearizable, including its final value."""
    for key in {event["key"] for event in events if event.get("event") == "call"}:
        history = operations(events, key)
        found = last(key)
        if not is_linearizable(history, found):
            lines = "\n  ".join(str(operation) for operation in history)
            raise ViolationError(f"key {key}, {found!r} in the end, has no order:\n  {lines}")


# -- exclusive create --------------------------------------------------------------------------


def creator(folder: Path, me: int, note: Note) -> None:
    recorder = Recorder(note)
    for number in range(2):
        path, value = folder / f"slot-{number}", f"{me}.{number}"
        data = pack(value)
        recorder.call("add", path.name, lambda p=path, d=data: atomic.exclusive_create(p, d), value)
        recorder.call("get", path.name, lambda p=path: _value(p))


def slot_reader(folder: Path, me: int, note: Note) -> None:
    recorder = Recorder(note)
    for number in (0, 1, 0, 1):
        path = folder / f"slot-{number}"
        recorder.call("get", path.name, lambda p=path: _value(p))


def sweeper(folder: Path, me: int, note: Note) -> None:
    for _ in range(2):
        atomic.sweep_temporaries(folder)


def check_folder(folder: Path, events: list[Event]) -> None:
    check_keys(events, lambda key: _value(folder / key))


# -- replace -----------------------------------------------------------------------------------


def replacer(folder: Path, me: int, note: Note) -> None:
    recorder = Recorder(note)
    for number in range(2):
        value = f"{me}.{number}"
        data = pack(value)
        recorder.call("put", "slot-0", lambda d=data: atomic.replace(folder / "slot-0", d), value)
        recorder.call("get", "slot-0", lambda: _value(folder / "slot-0"))


# -- names -------------------------------------------------------------------------------------


def _added(store: NameStore, key: str, value: str) -> bool:
    try:
        store.add(key, value)
    except NameExistsError:
        return False
    return True


def _got(store: NameStore, key: str) -> str | None:
    try:
        return store.get(key)
    except NameNotFoundError:
        return None


def namer(folder: Path, me: int, note: Note) -> None:
    """Add and replace keys that other actors also change."""
    store, recorder = NameStore(folder), Recorder(note)
    for number in range(2):
        value = f"{me}.{number}"
        recorder.call("add", "a", lambda v=value: _added(store, "a", v), value)
        recorder.call("get", "a", lambda: _got(store, "a"))
        put = lambda v=value: store.add("a/b", v, replace=True)  # noqa: E731
        recorder.call("put", "a/b", put, value)


def claimer(folder: Path, me: int, note: Note) -> None:
    """Claim the next free number, like an agent's attempt."""
    store, recorder = NameStore(folder), Recorder(note)
    for number in range(100):
        key = f"attempt/{number}"
        if recorder.call("add", key, lambda k=key: _added(store, k, str(me)), str(me)):
            return


def _check_names(folder: Path, events: list[Event]) -> None:
    store = NameStore(folder)
    check_keys(events, lambda key: _got(store, key))
    unknown = set(store.find_subtree("")) - {e["key"] for e in events if e.get("event") == "call"}
    if unknown:
        raise ViolationError(f"keys that nobody added: {unknown}")


# -- leases ------------------------------------------------------------------------------------


def holder(folder: Path, me: int, note: Note) -> None:
    lease = Lease(folder / "lease")
    for counter in range(1, 6):
        note(event="beat", counter=counter)
        lease.beat()
        note(event="beaten", counter=counter)


def observer(folder: Path, me: int, note: Note) -> None:
    for _ in range(6):
        note(event="look")
        try:
            note(event="seen", counter=read_counter(folder / "lease"))
        except SlurmrlError as error:
            note(event="error", error=str(error))


def _check_lease(folder: Path, events: list[Event]) -> None:
    begun = done = 0
    least: dict[int, int] = {}
    for event in events:
        if event["event"] == "beat":
            begun = event["counter"]
        elif event["event"] == "beaten":
            done = event["counter"]
        elif event["event"] == "look":
            least[event["actor"]] = max(done, least.get(event["actor"], 0))
        elif event["event"] == "seen":
            seen = event["counter"]
            if seen is None:
                if least[event["actor"]]:
                    raise ViolationError(f"no counter after beat {least[event['actor']]}")
            elif not least[event["actor"]] <= seen <= begun:
                raise ViolationError(f"counter {seen}, between {least} and {begun} was written")
            else:
                least[event["actor"]] = seen
        elif event["event"] == "error":
            raise ViolationError(event["error"])


def _nothing(folder: Path) -> None:
    pass


def _three(actor: Actor) -> tuple[Actor, ...]:
    return (actor, actor, actor)


SCENARIOS = (
    Scenario(
        "exclusive", _nothing, (creator, creator, slot_reader, sweeper), check_folder, creator
    ),
    Scenario(
        "replace", _nothing, (replacer, replacer, slot_reader, sweeper), check_folder, replacer
    ),
    Scenario("names", _nothing, (namer, namer), _check_names, namer),
    Scenario("attempts", _nothing, _three(claimer), _check_names, claimer),
    Scenario("lease", _nothing, (holder, observer, observer), _check_lease),
)
