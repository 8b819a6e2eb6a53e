"""Checks that a dataset's rows have the keys of its type. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.fields import ABSENT, has, paths
from slurmrl.data.records import MOST_PROBLEMS, listed
from slurmrl.data.row_fields import Requirement, RowField, curriculum_field
from slurmrl.data.text import wrong_text
from slurmrl.data.types.base import RowType
from slurmrl.errors import ConfigError, Problem


class RowChecks:
    """Checks rows one after the other. A key that no row has is a problem of the setting, one that
    some lack is a problem of those; which it is turns out at the end."""

    def __init__(self, kind: RowType, where: Callable[[int], str]) -> None:
        """``where`` gives the place of a row."""
        self._kind = kind
        self._curriculum = kind.config.curriculum_key
        self._where = where
        self._fields: dict[str, RowField] = {}
        """By key; of several fields with one key, the first."""
        for field in [*kind.fields(), *curriculum_field(kind.config)]:
            self._fields.setdefault(field.key, field)
        self._required = {
            key for key, field in self._fields.items() if field.requirement is Requirement.EVERY
        }
        self.fillable = True
        """Whether all rows so far are right; the others' problems come at the end."""
        self._empty = True
        """Whether there was no row so far."""
        self._unnamed = kind.config.id_key != DatasetConfig.model_fields["id_key"].default
        """Whether no row so far has the id that the configuration asks for."""
        self._present: dict[str, None] = {}
        """The keys that rows have."""
        self._suspects: dict[tuple[frozenset[str], bool], list[tuple[int, Mapping[str, Any]]]] = {}
        """The first rows that lack some keys, or that are wrong even without these."""

    def add(self, number: int, row: Mapping[str, Any]) -> None:
        self._empty = False
        self._unnamed = self._unnamed and not has(row, self._kind.config.id_key)
        if not row.keys() <= self._present.keys():
            self._present.update(dict.fromkeys(paths(row)))
        present = [key for key, field in self._fields.items() if field.value(row) is not ABSENT]
        self._present.update(dict.fromkeys(present))
        wrong = bool(self._wrong(row, present))
        lacks = frozenset(
            key
            for key, field in self._fields.items()
            if key not in present and field.requirement is not Requirement.ANY
        )
        if wrong or lacks:
            self.fillable = self.fillable and not wrong and lacks.isdisjoint(self._required)
            alike = self._suspects.setdefault((lacks, wrong), [])
            if len(alike) < MOST_PROBLEMS:
                alike.append((number, row))

    def finish(self) -> None:
        """:raises ConfigError: each problem names its line or the setting."""
        known = [key for key in self._fields if key in self._present]
        bad = [
            suspect
            for (lacks, wrong), alike in self._suspects.items()
            for suspect in alike
            if wrong or lacks & set(known)
        ]
        rows = [
            Problem(self._where(number), key, message)
            for number, row in sorted(bad, key=lambda suspect: suspect[0])
            for key, message in self._wrong(row, known)
        ]
        problems = [*self._of_settings(), *rows]
        if problems:
            raise ConfigError(listed(problems))

    def _of_settings(self) -> Iterator[Problem]:
        yield from self._kind.wrong_settings()
        if self._empty:  # which says nothing about keys
            return
        config, present = self._kind.config, list(self._present)
        if self._unnamed:
            named = RowField(config.id_key, "id_key", wrong_text)
            yield Problem("", "id_key", named.absence(config.path, present))
        for key, field in self._fields.items():
            optional = field.requirement is Requirement.ANY
            unused = field.requirement is Requirement.EVERY_OR_NONE and key == field.name
            if key not in self._present and not optional and not unused:
                yield Problem("", field.setting, field.absence(config.path, present))

    def _wrong(self, row: Mapping[str, Any], keys: list[str]) -> list[tuple[str, str]]:
        """The keys whose values cannot be used, and why."""
        each = ((self._fields[key].key_in(row), self._reason(row, key)) for key in keys)
        wrong = [(key, message) for key, message in each if message]
        if wrong or not keys:
            return wrong
        texts = {key: self._fields[key].value(row) for key in keys if key != self._curriculum}
        if texts and all(isinstance(text, str) and not text.strip() for text in texts.values()):
            return [(", ".join(texts), "must not all be empty")]
        complete = self._required <= set(keys)
        problem = self._kind.wrong_row(row) if complete else None
        return [problem] if problem else []

    def _reason(self, row: Mapping[str, Any], key: str) -> str:
        field = self._fields[key]
        if (value := field.value(row)) is not ABSENT:
            return field.wrong(value)
        if field.requirement is Requirement.ANY:
            return ""
        return f"missing; the line has {', '.join(row) or 'no keys'}"
