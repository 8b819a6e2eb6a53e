"""One record of the history, and its JSON form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from slurmrl.errors import CorruptFileError


class Kind(StrEnum):
    BEGIN = "begin"
    """An incarnation begins: ``base``, the directory of the commit that it goes on from, or null;
    where it is left out, the newest."""
    COMMIT = "commit"
    """A checkpoint exists from here on: ``step``, ``directory``."""
    DELETE = "delete"
    """A commit is gone; its files may be removed after this: ``step``, ``directory``, and the
    ``reason`` if it was found damaged."""
    EXPORT = "export"
    """A model was exported: ``step``, ``directory``."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RESUME = "resume"
    """The end before this does not hold any more."""

    @property
    def is_end(self) -> bool:
        return self in (Kind.FINISHED, Kind.FAILED, Kind.CANCELLED)


@dataclass(frozen=True)
class Record:
    slot: int
    kind: Kind
    incarnation: int
    """The incarnation that wrote it; for commands, the newest one at that time (0: none)."""
    time: float
    """Seconds since the epoch by the writer's clock, to be shown and never compared."""
    data: dict[str, Any]


def pack(record: Record, nonce: str) -> bytes:
    """The record as a JSON object; ``nonce`` tells writers of equal records apart."""
    content = {
        "slot": record.slot,
        "kind": record.kind.value,
        "incarnation": record.incarnation,
        "time": record.time,
        "nonce": nonce,
        "data": record.data,
    }
    return (json.dumps(content) + "\n").encode()


def unpack(data: bytes, slot: int) -> Record:
    """The record in ``slot``. Raises CorruptFileError."""
    try:
        content = json.loads(data)
        record = Record(
            content["slot"],
            Kind(content["kind"]),
            content["incarnation"],
            content["time"],
            content["data"],
        )
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CorruptFileError(f"history slot {slot} is not a record: {error!r}") from error
    if (
        record.slot != slot
        or type(record.incarnation) is not int
        or type(record.time) not in (int, float)
        or not isinstance(record.data, dict)
    ):
        raise CorruptFileError(f"history slot {slot} is not a record: {record}")
    return record
