"""Reading and appending: slot n is the file ``history/<n>``, made by an exclusive create."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmrl.errors import CorruptFileError, SlotTakenError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.failures import explain
from slurmrl.history.record import Kind, Record, pack, unpack

SLOT_DIGITS = 8
HIDDEN_PAUSES_S = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Pauses before looks at the directory while a slot that must exist does not show: NFS clients
may believe for a minute that a file is missing."""


class History:
    """The records of one trial. Records never change, so each is read once per object.

    ``directory`` is made with the run directory; without it there are no records, and append
    raises EnvironmentFailure; so does read once it has seen the directory. ``clock`` gives the
    time that records show.
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
        """Those that `record` has read."""
        self._listed_once = False
        """The directory was there, so its absence is a failure and no empty history."""

    def read(self, *, at_least: int = 0) -> list[Record]:
        """All records, from slot 0 without a gap, and no fewer than ``at_least``.

        Raises EnvironmentFailure, and CorruptFileError if a slot is missing below one that is
        there: only after some time, since caches and listings can show a newer slot before an
        older one.
        """
        for pause_s in HIDDEN_PAUSES_S:
            if pause_s:
                self._calls.sleep(pause_s)
            least = max(at_least, self._listed())
            while (record := self._read_slot(len(self._records))) is not None:
                self._records.append(record)
            if len(self._records) >= least:
                return list(self._records)
        raise CorruptFileError(
            f"{self._directory}: slot {len(self._records)} is missing, slot {least - 1} was made"
        )

    def count(self) -> int:
        """How many records there are, without reading them."""
        count = self._listed()
        while self._look_at(count):  # made since the listing, or hidden from it
            count += 1
        return count

    def record(self, slot: int) -> Record:
        """One of the first `count` records. Raises as `read`."""
        for pause_s in HIDDEN_PAUSES_S:
            if pause_s:
                self._calls.sleep(pause_s)
                self._listed()
            if self._look_at(slot):
                return self._single[slot]
        raise CorruptFileError(f"{self._directory}: slot {slot} is missing, a later one was made")

    def _look_at(self, slot: int) -> bool:
        if slot not in self._single and (record := self._read_slot(slot)) is not None:
            self._single[slot] = record
        return slot in self._single

    def append(self, kind: Kind, incarnation: int, data: dict[str, Any], *, after: int) -> Record:
        """Win slot ``after + 1``; ``after`` is the last slot that the caller has read (-1: none).

        Raises SlotTakenError if somebody else has it, EnvironmentFailure.
        """
        record = Record(after + 1, kind, incarnation, self._clock(), data)
        path = self._path(record.slot)
        if not atomic.exclusive_create(path, pack(record, uuid.uuid4().hex), calls=self._calls):
            raise SlotTakenError(record.slot)
        return record

    def _path(self, slot: int) -> Path:
        return self._directory / f"{slot:0{SLOT_DIGITS}d}"

    def _read_slot(self, slot: int) -> Record | None:
        try:
            data = atomic.read(self._path(slot), calls=self._calls)
        except FileNotFoundError:
            return None
        return unpack(data, slot)

    def _listed(self) -> int:
        """One more than the highest slot in the listing. Listing also makes an NFS client look
        for new files that its cache believed missing."""
        try:
            names = atomic.list_names(self._directory, calls=self._calls)
        except FileNotFoundError as error:
            if self._listed_once:
                raise explain(error, "list", self._directory) from error
            return 0
        self._listed_once = True
        long = filter(str.isdecimal, [name for name in names if len(name) >= SLOT_DIGITS])
        return max(map(int, long), default=-1) + 1
