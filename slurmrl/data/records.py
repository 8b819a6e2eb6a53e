"""The rows of a dataset's file before tokenization. Torch-free.

Rows have unique ids and the keys of the dataset's type (`RowChecks`). `longest_row` and
`has_messages` read only the beginning of a file.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.conversations import wrong_text
from slurmrl.data.row_images import wrong_media
from slurmrl.data.sources import open_source
from slurmrl.data.types import (
    ABSENT,
    Requirement,
    RowField,
    RowType,
    curriculum_field,
    has,
    paths,
    type_of_rows,
    value_at,
)
from slurmrl.errors import ConfigError, Problem, SlurmrlError
from slurmrl.fsio import inputs

MOST_PROBLEMS = 20
"""Maximum number of problems to report for a file."""
FEW = 3
"""Maximum number of rows to name after the first row with a problem."""
_VARIABLE: Final = re.compile(r" in column \d+| \([^()]*\): write .*")


class NumberedRow(NamedTuple):
    number: int
    """Line number in a JSONL file, row number in other files; counted from 1."""
    raw: bytes
    """The row as JSON."""
    row: dict[str, Any]


Convert = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class RecordReader:
    """Reads the rows of a file one by one; keeps 8 bytes of each row to find duplicate ids.

    Iterate over the reader to the end, then call `finish`.

    :raises ConfigError: the path or the split cannot be used.
    :raises MissingDependencyError: reading the format needs a package that is not installed.
    :raises EnvironmentFailure: the file cannot be read.
    """

    def __init__(
        self,
        path: Path,
        id_key: str,
        split: str | None = None,
        *,
        most_bytes: int | None = None,
        convert: Convert | None = None,
    ) -> None:
        """With ``most_bytes``, read only the complete rows in the first ``most_bytes``.

        ``convert`` converts each row of the file.
        """
        self._convert = convert
        self.rows = 0
        self.source = open_source(path, split, most_bytes=most_bytes)
        self.where = self.source.where
        """Function that returns the place of a row that was read, for messages."""
        self._ids = _Ids(path, id_key, split, convert)
        self._problems: list[Problem] = []

    @property
    def share(self) -> float:
        """The fraction of the file that has been read."""
        return self.source.done / max(self.source.size, 1)

    def __iter__(self) -> Iterator[NumberedRow]:
        """Yield the rows that are JSON objects; `finish` reports the other rows.

        :raises ConfigError: there are `MOST_PROBLEMS` such rows.
        """
        for number, raw, row, problem in self.source.rows():
            if row is not None and self._convert is not None:
                row, raw, problem = _converted(self._convert, row)
            if row is not None:
                self.rows += 1
                self._ids.add(number, row)
                yield NumberedRow(number, raw, row)
                continue
            self._problems.append(Problem(self.where(number), "", problem))
            if len(self._problems) == MOST_PROBLEMS:
                raise ConfigError(listed(self._problems))

    def finish(self) -> None:
        """Check the file as a whole.

        :raises ConfigError: rows that are not JSON objects, missing or duplicate ids, an empty
            file; each problem names its line.
        """
        if not self.rows and not self._problems:
            self._problems.append(Problem(str(self.source.path), "", "the file has no rows"))
        problems = [*self._problems, *self._ids.problems(self.where)]
        if self._ids.are_null:
            message = (
                f"'{self._ids.key}' is null in all rows of {self.source.path} that have it: remove "
                "the key, so that line numbers are the ids, or name another key"
            )
            problems.append(Problem("", "id_key", message))
        if problems:
            raise ConfigError(listed(problems))


@dataclass(frozen=True)
class Records:
    """All rows of a file in memory. ``ids[i]`` names ``rows[i]``."""

    rows: tuple[dict[str, Any], ...]
    ids: tuple[str, ...]
    numbers: tuple[int, ...]
    """The number of each row (`NumberedRow.number`), in the order of rows."""
    where: Callable[[int], str]
    """Function that maps the number of a row to the row's place, for messages."""
    whole: bool = True
    """Whether the file was read to its end."""


def read_records(
    path: Path,
    id_key: str,
    split: str | None = None,
    *,
    most_bytes: int | None = None,
    convert: Convert | None = None,
) -> Records:
    """Read all rows, or the complete rows in the first ``most_bytes``.

    :raises ConfigError: see `RecordReader.finish`.
    :raises EnvironmentFailure: the file cannot be read.
    """
    reader = RecordReader(path, id_key, split, most_bytes=most_bytes, convert=convert)
    numbered = [(record.number, record.row) for record in reader]
    reader.finish()
    return Records(
        tuple(row for _, row in numbered),
        tuple(id_of(row, id_key, number) for number, row in numbered),
        tuple(number for number, _ in numbered),
        reader.where,
        reader.source.whole,
    )


def id_of(row: Mapping[str, Any], id_key: str, number: int) -> str:
    """Return a row's id; in a file without ids, its number."""
    name = value_at(row, id_key)
    return str(number if name is ABSENT else name)


def _converted(convert: Convert, row: dict[str, Any]) -> tuple[dict[str, Any] | None, bytes, str]:
    """Return the row that the user's ``convert`` makes and its JSON, or None and the problem."""
    try:
        made = convert(row)
        if not isinstance(made, dict):
            return None, b"", f"convert must return a dict, but returned {type(made).__name__}"
        raw = json.dumps(made).encode()
        return json.loads(raw), raw, ""
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return None, b"", f"convert failed: {type(error).__name__}: {error}"


class _Ids:
    """The ids of a file: all rows have an id, or no row has an id. Only hashes of ids are kept."""

    def __init__(self, path: Path, key: str, split: str | None, convert: Convert | None) -> None:
        self._convert = convert
        self._path = path
        self.key = key
        self._split = split
        self._named = False
        """Whether any row has the key."""
        self._hashes = array("q")
        self._missing: list[int] = []
        self._wrong: list[tuple[int, str]] = []
        """The first rows without an id, or with a value that cannot be an id."""

    def add(self, number: int, row: Mapping[str, Any]) -> None:
        self._named = self._named or has(row, self.key)
        name = value_at(row, self.key)
        if name is ABSENT or name is None:
            if len(self._missing) < MOST_PROBLEMS:
                self._missing.append(number)
            return
        message = _wrong_id(name)
        if not message:
            self._hashes.append(hash(str(name)))
        elif len(self._wrong) < MOST_PROBLEMS:
            self._wrong.append((number, message))

    @property
    def are_null(self) -> bool:
        """Whether rows have the key, but all values are null."""
        return self._named and not self._hashes and not self._wrong

    def problems(self, where: Callable[[int], str]) -> list[Problem]:
        """Return the first problems, in the order of rows."""
        if not self._named or self.are_null:
            return []
        missing = [(number, "missing here, though other rows have it") for number in self._missing]
        twice = islice(self._duplicates(where), MOST_PROBLEMS)
        return [
            Problem(where(number), self.key, message)
            for number, message in sorted([*self._wrong, *missing, *twice])
        ]

    def _duplicates(self, where: Callable[[int], str]) -> Iterator[tuple[int, str]]:
        """Read the file again to find the ids whose hashes occur more than once."""
        import numpy as np  # Most commands do not need this slow import.

        hashes, counts = np.unique(np.frombuffer(self._hashes, np.int64), return_counts=True)
        often = frozenset(hashes[counts > 1].tolist())
        first: dict[str, int] = {}
        again = RecordReader(self._path, self.key, self._split, convert=self._convert)
        for record in again if often else ():
            name = str(value_at(record.row, self.key))
            if hash(name) in often and first.setdefault(name, record.number) != record.number:
                yield record.number, f"'{name}' is already the id of {_short(where(first[name]))}"


def listed(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Return the first `MOST_PROBLEMS` problems; merge equal problems of several rows.

    A merged problem has the place of the first row, and a message with the number of rows.
    """
    alike: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems[:MOST_PROBLEMS]:
        alike.setdefault((problem.key, _VARIABLE.sub("", problem.message)), []).append(problem)
    found: list[Problem] = []
    for first, *others in alike.values():
        if len(others) < FEW:
            found += [first, *others]
            continue
        more = " or more" if len(problems) >= MOST_PROBLEMS else ""
        named = ", ".join(_short(other.where) for other in others[:FEW])
        rows = f"in {len(others) + 1}{more} rows, also in {named}"
        found.append(Problem(first.where, first.key, f"{first.message} ({rows})"))
    return tuple(found)


def _short(where: str) -> str:
    """Return a place without its folder.

    ``/data/rows.jsonl:3`` becomes ``line 3``, and ``/data/rows.parquet, row 3`` becomes
    ``rows.parquet, row 3``.
    """
    line = where.rpartition(":")[2]
    return f"line {line}" if line.isdecimal() else Path(where).name


def _wrong_id(value: Any) -> str:
    """Return why a value is not an id; "" for an id."""
    if isinstance(value, str):
        return wrong_text(value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    return "" if whole else "must be a string or an integer"


class RowChecks:
    """Checks rows one after the other.

    If no row has a key, the setting is wrong. If only some rows lack the key, these rows are wrong.
    Only the last row decides which case applies.
    """

    def __init__(self, kind: RowType, where: Callable[[int], str]) -> None:
        """``where`` returns the place of a row."""
        self._kind = kind
        self._curriculum = kind.config.curriculum_key
        self._where = where
        self._fields: dict[str, RowField] = {}
        """Mapping from key to field: the first field if several fields have the same key."""
        for field in [*kind.fields(), *curriculum_field(kind.config)]:
            self._fields.setdefault(field.key, field)
        self._required = {
            key for key, field in self._fields.items() if field.requirement is Requirement.EVERY
        }
        self.fillable = True
        """Whether all rows so far are valid; problems of invalid rows are reported at the end."""
        self._empty = True
        """Whether no row was checked so far."""
        self._lists: list[str] = []
        """Keys of the only row so far whose values are lists of objects, perhaps the real rows."""
        self._unnamed = kind.config.id_key != DatasetConfig.model_fields["id_key"].default
        """Whether the configuration sets ``id_key`` and no row so far has this key."""
        self._present: dict[str, None] = {}
        """The keys that rows have."""
        self._suspects: dict[tuple[frozenset[str], bool], list[tuple[int, Mapping[str, Any]]]] = {}
        """The first rows that lack some keys or are invalid for another reason."""

    def add(self, number: int, row: Mapping[str, Any]) -> None:
        self._lists = [key for key in row if _has_rows(row[key])] if self._empty else []
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
        """Raise ConfigError for invalid rows; each problem names its line or the setting."""
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
        if self._empty:  # an empty file cannot show which keys rows have
            return
        config, present = self._kind.config, list(self._present)
        if self._unnamed:
            named = RowField(config.id_key, "id_key", wrong_text)
            yield Problem("", "id_key", named.absence(config.path, present))
        for key, field in self._fields.items():
            optional = field.requirement is Requirement.ANY
            unused = field.requirement is Requirement.EVERY_OR_NONE and key == field.name
            if key not in self._present and not optional and not unused:
                message = field.absence(config.path, present)
                remedy = "".join(REMEDY.format(key) for key in self._lists[:1])
                yield Problem("", field.setting, message + remedy)

    def _wrong(self, row: Mapping[str, Any], keys: list[str]) -> list[tuple[str, str]]:
        """Return the keys whose values cannot be used, and why."""
        each = ((self._fields[key].key_in(row), self._reason(row, key)) for key in keys)
        wrong = [(key, message) for key, message in each if message]
        if wrong or not keys:
            return wrong
        texts = {key: self._fields[key].value(row) for key in keys if key != self._curriculum}
        if texts and all(isinstance(text, str) and not text.strip() for text in texts.values()):
            return [(", ".join(texts), "must not all be empty")]
        complete = self._required <= set(keys)
        problem = None
        if complete:
            problem = self._kind.wrong_row(row) or wrong_media(self._kind.config, row, self._fields)
        return [problem] if problem else []

    def _reason(self, row: Mapping[str, Any], key: str) -> str:
        field = self._fields[key]
        if (value := field.value(row)) is not ABSENT:
            return field.wrong(value)
        if field.requirement is Requirement.ANY:
            return ""
        return f"is missing; the line has the keys {', '.join(row) or '(none)'}"


REMEDY: Final = "; if the rows are in the list '{0}', run jq -c '.{0}[]' FILE > ROWS.jsonl"


def _has_rows(value: Any) -> bool:
    """Return whether a value is a list of objects that are not messages."""
    return bool(value and isinstance(value, list)) and all(
        isinstance(each, dict) and not each.keys() & {"role", "from"} for each in value
    )


MOST_BYTES: Final = 16 * 2**20
"""Maximum number of bytes to read, which takes about 0.1 s."""
TEMPLATE_TOKENS: Final = 128
"""Maximum number of tokens that a chat template adds to a conversation without tools, such as a
default system prompt."""
MARKS: Final = 2
"""Number of tokens that a tokenizer adds before and after a string."""
FIELD: Final = re.compile(r"\{([^{}]*)\}")


def longest_row(dataset: DatasetConfig) -> int | None:
    """Return an upper bound on the tokens of the longest row; None if it is unknown.

    A string has at most as many tokens as bytes, and at most as many bytes as its JSON. The bound
    is unknown if files are larger than `MOST_BYTES` or unreadable, if a user's own type makes the
    rows, or if rows have images or videos.
    """
    sizes = [_longest_of(part) for part in dataset.parts.values()]
    known = [size for size in sizes if size is not None]
    return max(known) if len(known) == len(sizes) else None


def _longest_of(part: DatasetConfig) -> int | None:
    if part.like is not None or part.media_keys:
        return None
    path = Path(part.path)
    try:
        if not path.is_dir():
            inputs.check_file(path)
        source = open_source(path, part.split, most_bytes=MOST_BYTES)
        longest = max((len(row.raw) for row in source.rows()), default=0)
    except SlurmrlError:
        return None  # the check of the data reports the error
    return longest * _repeats(part) + _added(part) if source.whole and longest else None


def _repeats(part: DatasetConfig) -> int:
    """Return the maximum number of times that the templates insert the same value of a row."""
    named = Counter(FIELD.findall(part.prompt_template) + FIELD.findall(part.answer_template))
    return max(named.values(), default=1)


def _added(part: DatasetConfig) -> int:
    """Return a bound on the tokens that templates add to the values of a row."""
    texts = [part.prompt_template, part.answer_template, part.system_prompt or ""]
    texts += [json.dumps(tool) for tool in part.tools or ()]
    size = sum(len(text.encode()) for text in texts)
    return size + (TEMPLATE_TOKENS if part.is_chat else MARKS)


MOST_ROWS: Final = 100
"""Maximum number of rows to read in search of a JSON object."""


def has_messages(config: DatasetConfig) -> bool | None:
    """Return whether rows have media or messages, and so need a chat template by default.

    Media are images and videos. Only the first row is searched for messages, under the keys of the
    type. Return None if no row can be read; other checks report the reason.
    """
    if config.media_keys:
        return True
    path = Path(config.path)
    if not (path.is_file() or path.is_dir()):
        return None
    try:
        with closing(open_source(path, config.split).rows()) as rows:
            read = (each.row for each in islice(rows, MOST_ROWS))
            first = next((row for row in read if row is not None), None)
    except SlurmrlError:
        return None
    return None if first is None else type_of_rows(config).holds_messages(first)
