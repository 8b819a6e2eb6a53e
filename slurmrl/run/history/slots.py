"""The records of a history: slot n is the exclusively created file ``history/<n>``."""

from __future__ import annotations

import errno
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from slurmrl import log
from slurmrl.backoff import HIDDEN_PAUSES_S
from slurmrl.errors import CorruptFileError, EnvironmentFailure, SlotTakenError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.calls import REAL, SystemCalls, cause, corrupt, explain
from slurmrl.fsio.documents import (
    COUNT,
    FILE_NAME,
    INTEGER,
    SECONDS,
    SIZE,
    TEXT,
    one_of,
    table,
)
from slurmrl.run.paths import RunPaths

END_OF_DATASET: Final = "the end of the dataset"
"""``reason`` of the end of a trial that reads the dataset once and has read all rows."""


class Kind(StrEnum):
    BEGIN = "begin"
    """An incarnation begins. The incarnation resumes from the commit in the directory ``base``, or
    starts from scratch if ``base`` is null. If ``base`` is absent, the newest commit counts."""
    COMMIT = "commit"
    """A checkpoint becomes valid. Fields: ``step``, ``directory``."""
    DELETE = "delete"
    """A commit becomes invalid, and its files may be removed. Fields: ``step``, ``directory``, and
    the ``reason`` if it was damaged."""
    EXPORT = "export"
    """A model was exported. Fields: ``step``, ``directory``."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RESUME = "resume"
    """The trial continues after its previous end."""

    @property
    def is_end(self) -> bool:
        return self in (Kind.FINISHED, Kind.FAILED, Kind.CANCELLED)


@dataclass(frozen=True)
class Record:
    slot: int
    kind: Kind
    incarnation: int
    """The incarnation that wrote the record, or the newest incarnation when a command wrote it (0
    for none)."""
    time: float
    """Seconds since the epoch by the writer's clock, for display only."""
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
    """Decode the record in ``slot``. Raises CorruptFileError, whose message names ``where``."""
    where = where or f"history slot {slot}"
    values = documents.parse(data, where, _FIELDS, _FIELDS)
    if values["slot"] != slot:
        raise corrupt(where, f"holds the record of slot {values['slot']}")
    kind = Kind(values["kind"])
    if kind in (Kind.COMMIT, Kind.DELETE, Kind.EXPORT):
        for name in ("step", "directory"):
            if values["data"].get(name) is None:
                raise corrupt(where, f"is a '{kind}' record without '{name}'")
    return Record(slot, kind, values["incarnation"], float(values["time"]), values["data"])


SLOT_DIGITS = 8
_SLOT = re.compile(r"[0-9]{8}|[1-9][0-9]{8,11}")
UNCACHED_PAUSES = 3
"""Number of pauses after which a missing slot counts as lost if no cache can hide it."""
LONG_PAUSE_S = 1.0
"""Length in seconds of the first pause that is logged."""

logger = log.get(__name__)


class History:
    """The records of one trial. Records never change, so each is read once per object.

    ``directory`` is created before the run's configuration. If the directory is missing:

    - Without the configuration, there are no records, and `append` raises EnvironmentFailure. If
      this object has seen the directory before, `read` also raises EnvironmentFailure.
    - With the configuration, all reads raise CorruptFileError, as for a replaced directory.

    ``clock`` provides the records' timestamps.
    """

    def __init__(
        self,
        directory: Path,
        *,
        calls: SystemCalls = REAL,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._calls = calls
        self._clock = clock
        self._records: list[Record] = []
        self._single: dict[int, Record] = {}
        """Mapping from slot to record, for the records that `record` has read."""
        self._listed_once = False
        """Whether the directory has existed, so that a missing directory is a failure."""

    def read(self, *, at_least: int = 0) -> list[Record]:
        """Return all records from slot 0 without a gap, and no fewer than ``at_least``.

        Raises EnvironmentFailure, and CorruptFileError if a slot below an existing slot stays
        missing. For a while, caches and listings can show a newer slot before an older slot.
        """
        least = at_least
        for _ in self._looks(lambda: self._path(len(self._records))):
            least = max(least, self._listed())
            while (record := self._read_slot(len(self._records))) is not None:
                self._records.append(record)
            if len(self._records) >= least:
                return list(self._records)
        raise self._missing(len(self._records), least - 1)

    def count(self) -> int:
        """Return the number of records without reading them."""
        count = self._listed()
        while self._look_at(count):  # the listing may lack the newest records
            count += 1
        return count

    def record(self, slot: int) -> Record:
        """Return one of the first `count` records. Raises the errors of `read`."""
        for again in self._looks(lambda: self._path(slot)):
            if again:
                self._listed()
            if self._look_at(slot):
                return self._single[slot]
        raise self._missing(slot, self._listed() - 1)

    def _looks(self, hidden: Callable[[], Path]) -> Iterator[int]:
        """Yield the number of each attempt to find a slot that must exist. Pause between attempts.

        If a cache may hide the slot, the attempts take about a minute, and the wait is logged.
        """
        yield 0
        cached = self._calls.caches(self._directory)
        pauses_s = HIDDEN_PAUSES_S if cached else HIDDEN_PAUSES_S[:UNCACHED_PAUSES]
        for number, pause_s in enumerate(pauses_s):
            if pause_s == LONG_PAUSE_S:
                logger.warning(
                    "%s was created but is not visible; a file system cache may hide it: "
                    "waiting another %.0f s for it",
                    hidden(),
                    sum(pauses_s[number:]),
                )
            self._calls.sleep(pause_s)
            yield number + 1

    def _missing(self, slot: int, made: int) -> CorruptFileError:
        return corrupt(self._path(slot), f"is missing although slot {made} exists")

    def _look_at(self, slot: int) -> bool:
        if slot not in self._single and (record := self._read_slot(slot)) is not None:
            self._single[slot] = record
        return slot in self._single

    def append(self, kind: Kind, incarnation: int, data: dict[str, Any], *, after: int) -> Record:
        """Write slot ``after + 1``. The caller has read all slots up to ``after`` (-1: none).

        Raises EnvironmentFailure, and SlotTakenError if another writer has the slot.
        """
        record = Record(after + 1, kind, incarnation, self._clock(), data)
        path = self._path(record.slot)
        if not atomic.exclusive_create(path, pack(record, uuid.uuid4().hex), calls=self._calls):
            raise SlotTakenError(record.slot)
        return record

    def _path(self, slot: int) -> Path:
        return self._directory / f"{slot:0{SLOT_DIGITS}d}"

    def _read_slot(self, slot: int) -> Record | None:
        path = self._path(slot)
        try:
            data = atomic.read(path, calls=self._calls)
        except FileNotFoundError:
            return None
        return unpack(data, slot, path)

    def _listed(self) -> int:
        """Return the highest slot in the listing of the directory, plus one.

        The listing also makes an NFS client forget that new files were missing.
        """
        try:
            names = atomic.list_names(self._directory, calls=self._calls)
        except FileNotFoundError as error:
            if self._was_removed():
                raise corrupt(self._directory, "was removed or renamed") from error
            if self._listed_once:
                raise explain(error, "list", self._directory) from error
            return 0
        except EnvironmentFailure as error:
            if cause(error) == errno.ENOTDIR and self._names_in_run():
                raise corrupt(self._directory, "is not a directory") from error
            raise
        self._listed_once = True
        return max((int(name) for name in names if _SLOT.fullmatch(name)), default=-1) + 1

    def _was_removed(self) -> bool:
        """Return whether the history is missing or a symlink, although the configuration exists."""
        names = self._names_in_run()
        return bool(names) and (self._directory.name not in names or self._directory.is_symlink())

    def _names_in_run(self) -> list[str]:
        """Return the names in the run directory; none if unknown, or without a configuration."""
        config = RunPaths(self._directory.parent).config
        names = atomic.known_names(config.parent, calls=self._calls) or []
        return names if config.name in names else []
