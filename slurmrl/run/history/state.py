"""The state of a trial, folded from the records of its history, and the steps that led to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurmrl.errors import CorruptFileError
from slurmrl.run.history.record import Kind, Record


@dataclass(frozen=True)
class Commit:
    """A checkpoint that exists."""

    step: int
    directory: str
    """Name of its folder in ``checkpoints/``."""
    incarnation: int
    data: dict[str, Any] = field(default_factory=dict)
    """Data of its record."""


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
    """Commits that were not deleted, by step."""
    last_commit: Commit | None = None
    """The newest commit, from which the next incarnation resumes."""
    end: Record | None = None
    """The end of the trial, unless resumed since."""
    base: str | None = None
    """Directory of the commit that the newest incarnation resumed from; None: a fresh start."""
    begins_without_commit: int = 0
    """Incarnations begun since the last commit or resume."""
    exports: tuple[Export, ...] = ()
    """In order of creation."""
    begin_data: dict[str, Any] = field(default_factory=dict)
    """Data of the newest BEGIN."""
    begin_slot: int = -1
    """Slot of the newest BEGIN."""
    ended_slot: int = -1
    """Slot of the newest end, resumed since or not."""

    @property
    def last_step(self) -> int:
        """Step of `last_commit`; -1 without one."""
        return self.last_commit.step if self.last_commit is not None else -1


def fold(records: Iterable[Record]) -> TrialState:
    """Fold records into a state. Raises CorruptFileError if they contradict each other."""
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
        fields.update(
            begins_without_commit=begins + 1,
            begin_data=record.data,
            begin_slot=record.slot,
            base=record.data.get("base", next(reversed(commits), None)),
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
    """Return the step and the directory in a record's data. Raises CorruptFileError."""
    step, directory = record.data.get("step"), record.data.get("directory")
    if type(step) is not int or not isinstance(directory, str) or not _is_name(directory):
        raise CorruptFileError(
            f"history slot {record.slot}: '{record.kind}' needs a step and a directory, "
            f"not {record.data}"
        )
    return step, directory


def _is_name(directory: str) -> bool:
    """Return whether this is a plain name, without path components."""
    return directory not in ("", ".", "..") and "/" not in directory


@dataclass(frozen=True)
class Lineage:
    """The last step that counts of each incarnation which led to the newest incarnation.

    None means that all of its steps count.

    An incarnation repeats the steps after the commit from which it resumes, so there may be two
    versions of a step's weights. Results of an earlier incarnation for steps after its last commit
    no longer count.
    """

    last_steps: Mapping[int, int | None]

    @staticmethod
    def of(records: Iterable[Record]) -> Lineage:
        """Raises CorruptFileError for records without what they need."""
        commits: dict[str, tuple[int, int]] = {}
        bases: dict[int, tuple[int, int] | None] = {}
        newest = 0
        for record in records:
            if record.kind is Kind.BEGIN:
                newest = record.incarnation
                base = record.data.get("base", next(reversed(commits), None))
                bases[newest] = commits.get(base) if base is not None else None
            elif record.kind is Kind.COMMIT:
                step, directory = place(record)
                commits.pop(directory, None)
                commits[directory] = step, record.incarnation
            elif record.kind is Kind.DELETE:
                commits.pop(place(record)[1], None)
        last_steps: dict[int, int | None] = {newest: None}
        while (base_of := bases.get(newest)) is not None:
            step, newest = base_of
            last_steps[newest] = step
        return Lineage(last_steps)

    def has(self, step: int, incarnation: int) -> bool:
        """Whether the weights of an incarnation after a step led to the newest weights."""
        if incarnation not in self.last_steps:
            return False
        last = self.last_steps[incarnation]
        return last is None or step <= last
