"""The steps that led to the weights of the newest incarnation.

An incarnation repeats the steps after the commit that it resumes from, so there may be two versions
of a step's weights. What an earlier incarnation made of a later step than its last commit counts no
more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slurmrl.run.history.record import Kind, Record
from slurmrl.run.history.state import place


@dataclass(frozen=True)
class Lineage:
    """The last step that counts of each incarnation which led to the newest one; None: all of its
    steps do."""

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
        """Whether the weights that an incarnation had after a step are among those that led to the
        newest ones."""
        if incarnation not in self.last_steps:
            return False
        last = self.last_steps[incarnation]
        return last is None or step <= last
