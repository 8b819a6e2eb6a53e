"""The turns of a trial's jobs (see `supervisor.baton`), as recorded in the name store."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from slurmrl import log
from slurmrl.errors import CorruptFileError, NameNotFoundError
from slurmrl.fsio import documents
from slurmrl.fsio.shapes import TEXT, FieldType, one_of
from slurmrl.name_resolve.base import NameStore
from slurmrl.run import keys

logger = log.get(__name__)

_START = FieldType(
    "JOBID.RESTARTCOUNT",
    lambda value: isinstance(value, str) and re.fullmatch(r"\d{1,12}\.\d{1,9}", value) is not None,
)
_ELEMENT = FieldType(
    "JOBID_INDEX",
    lambda value: isinstance(value, str) and re.fullmatch(r"\d{1,12}_\d{1,9}", value) is not None,
)


class Left(StrEnum):
    """How the previous job left the trial."""

    ENDED = "ended"
    PUT_BACK = "put back"
    """Slurm has requeued it, or ended it with its host, through no fault of the job."""
    UNKNOWN = "unknown"


FIELDS = {
    "start": _START,
    "element": _ELEMENT,
    "host": TEXT,
    "before": TEXT,
    "left": one_of(*Left),
}


@dataclass(frozen=True)
class Turn:
    """One job's time with the trial."""

    start: str
    """``JOBID.RESTARTCOUNT``."""
    element: str
    """``41_3``."""
    host: str
    """Where its batch process runs."""
    before: str = ""
    """The start before it."""
    left: Left = Left.UNKNOWN

    @property
    def job(self) -> str:
        return self.start.partition(".")[0]

    @property
    def restarts(self) -> int:
        return int(self.start.partition(".")[2])


def read(names: NameStore, number: int) -> Turn | None:
    """Return the turn with a number; None if there is none. Raises CorruptFileError."""
    key = keys.baton(number)
    try:
        values = documents.parse(names.get(key), f"the name {key}", FIELDS, FIELDS)
    except NameNotFoundError:
        return None
    left = Left(values["left"])
    return Turn(values["start"], values["element"], values["host"], values["before"], left)


def read_intact(names: NameStore, number: int) -> Turn | None:
    """Read a turn; a damaged one counts as none, so that it cannot block every job."""
    try:
        return read(names, number)
    except CorruptFileError as error:
        logger.warning("%s", error)
        return None


def put_back(names: NameStore) -> frozenset[str]:
    """Return the starts of jobs that Slurm took away from the trial."""
    batons = names.find_subtree(keys.batons())
    numbers = [int(tail) for key in batons if (tail := key.rpartition("/")[2]).isdecimal()]
    turns = [turn for number in numbers if (turn := read_intact(names, number)) is not None]
    return frozenset(turn.before for turn in turns if turn.left is Left.PUT_BACK)
