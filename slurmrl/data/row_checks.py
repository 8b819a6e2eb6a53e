"""Checks that a dataset's rows fill in its templates. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.config.template import DOUBLING, Template
from slurmrl.data.records import MOST_PROBLEMS
from slurmrl.data.text import wrong_text
from slurmrl.errors import ConfigError, Problem
from slurmrl.registry import near

TEMPLATES: Final[Mapping[str, tuple[str, ...]]] = {
    "prompt": ("prompt_template",),
    "prompt_answer": ("prompt_template", "answer_template"),
    "preference": ("prompt_template", "answer_template"),
    "kto": ("prompt_template", "answer_template"),
}
"""The templates that each type of dataset fills in."""
KEYS: Final[Mapping[str, str]] = {"prompt": "prompt_key", "answer": "answer_key"}
"""The settings with the line's key for a template field."""


def templates_of(config: DatasetConfig) -> dict[str, Template]:
    return {name: Template.parse(getattr(config, name)) for name in TEMPLATES[config.type]}


def key_of(config: DatasetConfig, field: str) -> str:
    """The line's key for a field of a template."""
    return str(getattr(config, KEYS[field])) if field in KEYS else field


class RowChecks:
    """Checks rows one after the other. A key that no row has is a problem of the setting, one that
    some lack is a problem of those; which it is turns out at the end."""

    def __init__(self, config: DatasetConfig) -> None:
        self._config = config
        self._fields = {
            (name, field): key_of(config, field)
            for name, template in templates_of(config).items()
            for field in template.fields
        }
        self._empty: dict[str, bool] = {}
        """The keys that count, and whether an empty text is allowed under each."""
        for (_, field), key in self._fields.items():
            self._empty.setdefault(key, field not in KEYS)
        self._empty.setdefault(config.answer_key, False)
        self.fillable = True
        """Whether the rows so far fill in the templates; the others' problems come at the end."""
        self._found: dict[str, None] = {}
        """The keys of all rows."""
        self._suspects: dict[tuple[frozenset[str], bool], list[tuple[int, Mapping[str, Any]]]] = {}
        """The first rows that lack some keys, or that are wrong even without these."""

    def add(self, line: int, row: Mapping[str, Any]) -> None:
        if not row.keys() <= self._found.keys():
            self._found.update(dict.fromkeys(row))
        present = [key for key in self._empty if key in row]
        wrong = bool(self._wrong(row, present))
        if wrong or len(present) < len(self._empty):
            lacks = frozenset(self._empty.keys() - row.keys())
            self.fillable = self.fillable and not wrong and lacks.isdisjoint(self._fields.values())
            alike = self._suspects.setdefault((lacks, wrong), [])
            if len(alike) < MOST_PROBLEMS:
                alike.append((line, row))

    def finish(self) -> None:
        """:raises ConfigError: each problem names its line or the setting."""
        known = [key for key in self._empty if key in self._found]
        bad = [
            suspect
            for (lacks, wrong), alike in self._suspects.items()
            for suspect in alike
            if wrong or lacks & set(known)
        ]
        rows = [
            Problem(f"{self._config.path}:{line}", key, message)
            for line, row in sorted(bad, key=lambda suspect: suspect[0])
            for key, message in self._wrong(row, known)
        ]
        problems = [*self._of_settings(), *rows]
        if problems:
            raise ConfigError(tuple(problems[:MOST_PROBLEMS]))

    def _of_settings(self) -> Iterator[Problem]:
        config, reported = self._config, set[str]()
        for (name, field), key in self._fields.items():
            if key not in self._found:
                reported.add(key)
                yield self._no_such_key(name, field)
        unused = config.answer_key not in {*self._found, *reported}
        if unused and config.answer_key != "answer":
            yield self._no_such_key("answer_key", "answer")

    def _no_such_key(self, setting: str, field: str) -> Problem:
        """``setting`` contains the field; for a field of KEYS, another setting names the key."""
        key, path = key_of(self._config, field), self._config.path
        if field in KEYS:
            message = f"{{{field}}} inserts '{key}', which is not a key of any line of {path}"
            return Problem("", KEYS[field], f"{message}; {near(key, list(self._found))}")
        fields = list(dict.fromkeys([*self._found, *KEYS]))
        message = f"'{key}' is not a key of any line of {path}; {near(key, fields)}"
        return Problem("", setting, f"{message}; {DOUBLING}")

    def _wrong(self, row: Mapping[str, Any], keys: list[str]) -> list[tuple[str, str]]:
        """The keys whose values cannot be inserted, and why."""
        each = ((key, _wrong(row, key, empty=self._empty[key])) for key in keys)
        wrong = [(key, message) for key, message in each if message]
        if not wrong and keys and not any(row[key].strip() for key in keys):
            wrong = [(", ".join(keys), "must not all be empty")]
        return wrong


def _wrong(row: Mapping[str, Any], key: str, *, empty: bool) -> str:
    """Why a line's value cannot be inserted; "" if it can. ``empty`` allows an empty text."""
    if key not in row:
        return f"missing; the line has {', '.join(row) or 'no keys'}"
    return wrong_text(row[key]) or ("" if empty or row[key].strip() else "must not be empty")
