"""One record of the history, and its JSON form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from slurmrl.fsio import documents
from slurmrl.fsio.failures import corrupt
from slurmrl.fsio.shapes import COUNT, FILE_NAME, INTEGER, SECONDS, SIZE, TEXT, check, one_of, table

END_OF_DATASET: Final = "the end of the dataset"
"""The ``reason`` for which a single pass over the dataset is finished, after all of its rows."""


class Kind(StrEnum):
    BEGIN = "begin"
    """An incarnation begins: ``base``, the directory of the commit that it resumes from, or null;
    if absent, the newest commit."""
    COMMIT = "commit"
    """A checkpoint exists from here on: ``step``, ``directory``."""
    DELETE = "delete"
    """A commit is deleted; its files may be removed from now on: ``step``, ``directory``, and the
    ``reason`` if it was damaged."""
    EXPORT = "export"
    """A model was exported: ``step``, ``directory``."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RESUME = "resume"
    """The previous end of the trial is lifted."""

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
    """Seconds since the epoch by the writer's clock; for display, never compared."""
    data: dict[str, Any]


def pack(record: Record, nonce: str) -> bytes:
    """Encode a record as JSON; ``nonce`` distinguishes writers of equal records."""
    content = {
        "slot": record.slot,
        "kind": record.kind.value,
        "incarnation": record.incarnation,
        "time": record.time,
        "nonce": nonce,
        "data": record.data,
    }
    return (json.dumps(content) + "\n").encode()


_FIELDS = {
    "slot": SIZE,
    "kind": one_of(*Kind),
    "incarnation": COUNT,
    "time": SECONDS,
    "data": table(
        {
            "step": COUNT,
            "directory": FILE_NAME,
            "base": FILE_NAME,
            "job": TEXT,
            "host": TEXT,
            "link": INTEGER,
            "submission": COUNT,
            "reason": TEXT,
            "traceback": TEXT,
        }
    ),
}


def unpack(data: bytes, slot: int, where: object = "") -> Record:
    """Decode the record in ``slot``. Raises CorruptFileError that names ``where``."""
    where = where or f"history slot {slot}"
    values = documents.parse(data, where, _FIELDS, _FIELDS)
    if values["slot"] != slot:
        raise corrupt(where, f"holds the record of slot {values['slot']}")
    kind = Kind(values["kind"])
    if kind in (Kind.COMMIT, Kind.DELETE, Kind.EXPORT):
        check(values["data"], {}, where, ("step", "directory"))
    return Record(slot, kind, values["incarnation"], float(values["time"]), values["data"])
