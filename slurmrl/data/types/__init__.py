"""The types of datasets: the keys of a row, and the sequences of tokens made from it.

To add a type, write a subclass of `RowType`, and add it to `ROW_TYPES`, to ``plan/dataflow.py``
(the keys of its samples) and to the schema. Torch-free.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.config.schema.data import DOUBLING, Template
from slurmrl.data.conversations import is_messages, kind_of, wrong_text
from slurmrl.data.encoder import RowTokens
from slurmrl.errors import Problem, UsageError
from slurmrl.fsio import inputs
from slurmrl.registry import Registry, import_own, near

if TYPE_CHECKING:
    from slurmrl.data.encoder import Encoder

Row = Mapping[str, Any]

ABSENT: Final = object()
"""The value of a key that a row does not have."""
MOST_LEVELS: Final = 8
"""Maximum depth of the nested keys that messages suggest."""


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """Return the value under ``key``, or ABSENT.

    A key that is not in the row is a path: ``a.b`` is ``row["a"]["b"]``, and a number is a place in
    a list.
    """
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return ABSENT
    return value


def has(row: Mapping[str, Any], key: str) -> bool:
    return value_at(row, key) is not ABSENT


def paths(row: Mapping[str, Any], prefix: str = "", levels: int = MOST_LEVELS) -> Iterator[str]:
    """Yield the keys of a row up to a depth; nested keys follow the keys that enclose them."""
    for key, value in row.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping) and levels > 1:
            yield from paths(value, f"{prefix}{key}.", levels - 1)


KEYS: Final[Mapping[str, str]] = {"prompt": "prompt_key", "answer": "answer_key"}
"""Mapping from a template's field to the setting that names the row's key."""


LARGEST: Final = 1e300
"""Upper bound, exclusive, of the absolute values of a curriculum's numbers."""


class Requirement(Enum):
    """Rule about which rows must have a key."""

    EVERY = "every row"
    EVERY_OR_NONE = "every row, or none"
    ANY = "any rows"


@dataclass(frozen=True)
class RowField:
    key: str
    """The key in the row, which may be nested."""
    setting: str
    """The setting that names the key, or whose template contains the key."""
    wrong: Callable[[Any], str]
    """Function that returns the reason why a value cannot be used, or "" if it can."""
    requirement: Requirement = Requirement.EVERY
    name: str = ""
    """The field of the template that inserts the value."""
    other: str = ""
    """Another key that a row may have instead of `key`."""

    def key_in(self, row: Mapping[str, Any]) -> str:
        """Return `other` if the row has this key, else `key`."""
        return self.other if self.other and has(row, self.other) else self.key

    def is_double(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row has a value under both keys. Null, as in tables, is no value."""
        keys = [key for key in (self.key, self.other) if key]
        return sum(value_at(row, key) not in (ABSENT, None) for key in keys) > 1

    def value(self, row: Mapping[str, Any]) -> Any:
        """Return the value, or ABSENT."""
        return value_at(row, self.key_in(row))

    def absence(self, path: str, present: list[str]) -> str:
        """Return the message that no row has the key. ``present`` are the keys that rows have."""
        fact = f"is not a key of any line of {path}"
        if self.name in KEYS:
            return f"{{{self.name}}} inserts '{self.key}', which {fact}; {near(self.key, present)}"
        if not self.name:
            return f"'{self.key}' {fact}; {near(self.key, present)}"
        fields = list(dict.fromkeys([*present, *KEYS]))
        return f"'{self.key}' {fact}; {near(self.key, fields)}; {DOUBLING}"


def template_fields(config: DatasetConfig, setting: str) -> list[RowField]:
    """Return the fields of a template."""
    fields = []
    for name in Template.parse(getattr(config, setting)).fields:
        if name in KEYS:
            key = str(getattr(config, KEYS[name]))
            fields.append(RowField(key, KEYS[name], wrong_full_text, name=name))
        else:
            fields.append(RowField(name, setting, wrong_text, name=name))
    return fields


def wrong_full_text(value: Any) -> str:
    """Return the reason why a value is not a string with more than white space."""
    return wrong_text(value) or ("" if value.strip() else "must not be empty")


def curriculum_field(config: DatasetConfig) -> list[RowField]:
    """Return the field by which a curriculum orders the rows; empty without a curriculum."""
    key = config.curriculum_key
    return [] if key is None else [RowField(key, "curriculum_key", _wrong_number)]


def _wrong_number(value: Any) -> str:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return f"must be a number, but is {kind_of(value)}"
    if abs(value) < LARGEST:
        return ""
    return f"must be a number between {-LARGEST:g} and {LARGEST:g}, but is {kind_of(value)}"


class RowType(ABC):
    """The keys that a row must have, its strings, and its sequences of tokens."""

    dataset: ClassVar[str]
    """``module:Class`` of the `data.dataset.TokenizedDataset` that makes samples of the rows."""
    templates: ClassVar[tuple[str, ...]] = ()
    """The settings whose templates are filled with values of rows."""

    def __init__(self, config: DatasetConfig) -> None:
        self.config = config
        self._filled = {
            setting: (Template.parse(getattr(config, setting)), template_fields(config, setting))
            for setting in self.templates
        }

    def fields(self) -> list[RowField]:
        """Return the keys of a row. Default: the fields of the templates."""
        return [field for _, fields in self._filled.values() for field in fields]

    def holds_messages(self, row: Row) -> bool:
        """Return whether a row has messages where the type allows them."""
        values = (field.value(row) for field in self.message_fields())
        return any(
            is_messages(value) or (isinstance(value, list) and any(map(is_messages, value)))
            for value in values
        )

    def message_fields(self) -> list[RowField]:
        """Return the keys whose values may be messages."""
        return [field for field in RowType.fields(self) if field.name in KEYS]

    def difficulty(self, row: Row) -> float:
        """Return the number of a checked row by which a curriculum orders it."""
        key = self.config.curriculum_key
        return 0.0 if key is None else float(value_at(row, key))

    def wrong_settings(self) -> Iterator[Problem]:
        """Return the problems of the settings that can be detected without rows."""
        return iter(())

    def wrong_row(self, row: Row) -> tuple[str, str] | None:
        """Return a key and why its value does not fit other values of the row."""
        return None

    def stored(self, row: Row, raw: bytes) -> bytes:
        """Return, as JSON, the fields of a row that samples need in addition to its tokens."""
        return b""

    def fits(self, row: RowTokens) -> bool:
        """Return whether all sequences are within the length limits."""
        most_prompt, most = self.config.max_prompt_tokens, self.config.max_tokens
        return all(
            (most_prompt is None or len(sequence.context) <= most_prompt)
            and (most is None or len(sequence.tokens) <= most)
            for sequence in row
        )

    def equal_pairs(self, row: RowTokens) -> int:
        """Return the number of pairs with equal tokens, from which nothing can be learned."""
        return 0

    def convert(self, row: Row) -> Row:
        """Convert a row of the file to a row with the keys of the type.

        A user's own type overrides this method; its exceptions are reported as problems of the row.
        """
        return row

    @abstractmethod
    def tokens(self, rows: Sequence[Row], encoder: Encoder) -> list[RowTokens | str]:
        """Return the sequences of checked rows; for a row without sequences, the reason."""

    def filled(self, setting: str, row: Row) -> str:
        """Return the template of a setting, filled with the values of a row."""
        template, fields = self._filled[setting]
        return template.fill({field.name: field.value(row) for field in fields})


ROW_TYPES = Registry(
    "dataset type",
    {
        "prompt": "slurmrl.data.types.prompt:Prompts",
        "prompt_answer": "slurmrl.data.types.prompt:PromptAnswers",
        "messages": "slurmrl.data.types.prompt:Conversations",
        "preference": "slurmrl.data.types.preference:Preferences",
        "kto": "slurmrl.data.types.preference:LabelledAnswers",
    },
)


def type_of_rows(config: DatasetConfig) -> RowType:
    """Return the type that a configuration names.

    :raises UsageError: a user's class that cannot be used.
    :raises UnreadableInputError: its module cannot be imported.
    """
    base: type[RowType] = ROW_TYPES.load(config.kind)
    if config.like is None:
        return base(config)
    own = import_own("dataset type", config.type)
    if not (isinstance(own, type) and issubclass(own, base)):
        where = f"{base.__module__}.{base.__name__}"
        raise UsageError(
            f"dataset type '{config.type}' must be a subclass of {where} (like: {config.like})"
        )
    return own(config)


def own_convert(kind: RowType) -> Callable[[Row], Row] | None:
    """Return the function that converts the file's rows, if the type is a user's own code."""
    return None if type(kind).convert is RowType.convert else kind.convert


def own_source(config: DatasetConfig) -> bytes:
    """Return the content of the file with a user's own type; b"" for a built-in type.

    Raises as `type_of_rows`.
    """
    if config.like is None:
        return b""
    path = inspect.getsourcefile(import_own("dataset type", config.type))
    return inputs.read(Path(path)) if path else b""
