"""A check that the history of one key is linearizable, after Wing and Gong, "Testing and verifying
concurrent objects" (1993), with memory of dead ends.

An operation that never returned (its process was killed) may have taken effect or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ABSENT = None


@dataclass(frozen=True)
class Operation:
    """One call.

    ``add``: (value) → True/False, ``put``: (value) → None, ``get`` → value or None.
    """

    kind: str
    argument: str | None
    result: Any
    begin: int
    end: int | None
    """Index of the event at which the call returned; None if it never returned."""


def operations(events: Sequence[dict[str, Any]], key: str) -> list[Operation]:
    """Return the operations from their events, in pairs per actor."""
    found: list[Operation] = []
    open_calls: dict[int, tuple[int, dict[str, Any]]] = {}
    for index, event in enumerate(events):
        if event.get("event") == "call":
            open_calls[event["actor"]] = (index, event)
        elif event.get("event") == "return":
            begin, call = open_calls.pop(event["actor"])
            if call["key"] == key:
                found.append(
                    Operation(call["kind"], call.get("argument"), event["result"], begin, index)
                )
    for begin, call in open_calls.values():
        if call["key"] == key:
            found.append(Operation(call["kind"], call.get("argument"), None, begin, None))
    return found


def apply(operation: Operation, value: str | None) -> tuple[bool, str | None]:
    """Return whether this result is possible if the key has ``value``, and the value afterwards."""
    returned = operation.end is not None
    if operation.kind == "add":
        added = value is ABSENT
        fits = not returned or operation.result == added
        return fits, operation.argument if added else value
    if operation.kind == "put":
        return True, operation.argument
    if operation.kind == "get":
        return not returned or operation.result == value, value
    raise ValueError(operation.kind)


def is_linearizable(history: Sequence[Operation], last: str | bool | None = False) -> bool:
    """``last``: the key's final value; False if unknown."""
    dead: set[tuple[frozenset[int], str | None]] = set()
    everything = frozenset(range(len(history)))

    def search(left: frozenset[int], value: str | None) -> bool:
        must = [index for index in left if history[index].end is not None]
        if not must and (last is False or value == last):
            return True
        if (left, value) in dead:
            return False
        horizon = min((history[index].end or 0 for index in must), default=1 << 60)
        for index in sorted(left):
            if history[index].begin > horizon:
                continue
            fits, after = apply(history[index], value)
            if fits and search(left - {index}, after):
                return True
        dead.add((left, value))
        return False

    return search(everything, ABSENT)
