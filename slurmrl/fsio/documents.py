"""Untrusted JSON documents: parsing with bounded size and depth, finite numbers, typed fields.

The module also reads and appends files of one document per line.

Every reader of a document checks its fields once and can rely on them afterwards.

A frozen dataclass can describe a document. The annotation of a field decides which values the field
accepts: ``int``, ``float``, ``str``, ``bool``, ``Annotated[int, COUNT]`` for other bounds, ``Any``,
or a ``tuple``, ``Mapping`` or dataclass of these. A field with a default may be missing. Unknown
fields, such as fields of a newer version, are ignored.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from slurmrl.errors import EnvironmentFailure, SlurmrlError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import MOVE_AWAY, REAL, REMEDY, SystemCalls, corrupt, unreadable
from slurmrl.fsio.calls import opened as opened_file

SHOWN_CHARACTERS = 80
FILE_NAME_BYTES = 255
"""Maximum size of a file name on Linux file systems."""


@dataclass(frozen=True)
class FieldType:
    """The values that a field may hold."""

    expected: str
    """Description of the values in messages, for example ``a number``."""
    accepts: Callable[[Any], bool]


Fields = Mapping[str, FieldType]
"""Mapping from field name to type. Other fields are allowed; a null field counts as missing."""


def _integer(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _number(value: Any, least: float, most: float) -> bool:
    return type(value) in (int, float) and least <= value <= most


def _file_name(value: Any) -> bool:
    if not isinstance(value, str) or value in ("", ".", "..") or set("/\0") & set(value):
        return False
    try:
        return len(os.fsencode(value)) <= FILE_NAME_BYTES
    except UnicodeEncodeError:  # The name has a lone surrogate.
        return False


MOST_COUNT = 10**7
"""Maximum of a count: above all numbers of hosts, ranks or elements, and safe for a loop."""
LONGEST_S = 1e11
"""Maximum of a duration and of a time since the epoch: about 3,000 years."""

INTEGER = FieldType("an integer", lambda value: _integer(value, -(2**53), 2**53))
COUNT = FieldType(f"an integer from 0 to {MOST_COUNT}", lambda v: _integer(v, 0, MOST_COUNT))
SIZE = FieldType("an integer that is not negative", lambda value: _integer(value, 0, 2**63))
NUMBER = FieldType("a number", lambda value: _number(value, -1e300, 1e300))
SECONDS = FieldType("a number of seconds", lambda value: _number(value, -LONGEST_S, LONGEST_S))
TEXT = FieldType("a string", lambda value: isinstance(value, str))
FLAG = FieldType("a boolean", lambda value: isinstance(value, bool))
FILE_NAME = FieldType("the name of a file or directory", _file_name)


def one_of(*values: str) -> FieldType:
    return FieldType(f"one of {', '.join(values)}", lambda value: value in values)


def list_of(kind: FieldType) -> FieldType:
    def accepts(value: Any) -> bool:
        return isinstance(value, list) and all(map(kind.accepts, value))

    return FieldType(f"a list, each item {kind.expected}", accepts)


def items(*kinds: FieldType) -> FieldType:
    """Return the type of a list with one item of each of these types, in order."""

    def accepts(value: Any) -> bool:
        return (
            isinstance(value, list)
            and len(value) == len(kinds)
            and all(kind.accepts(item) for kind, item in zip(kinds, value, strict=True))
        )

    return FieldType(f"a list of {', '.join(kind.expected for kind in kinds)}", accepts)


def table(fields: Fields, required: Collection[str] = ()) -> FieldType:
    """Return the type of an object with these fields."""

    def accepts(value: Any) -> bool:
        return isinstance(value, dict) and wrong(value, fields, required) is None

    return FieldType(f"an object with {', '.join(fields)}", accepts)


def each(kind: FieldType) -> FieldType:
    """Return the type of an object with any keys whose values all have type ``kind``."""

    def accepts(value: Any) -> bool:
        return isinstance(value, dict) and all(map(kind.accepts, value.values()))

    return FieldType(f"an object, each value {kind.expected}", accepts)


def wrong(values: Mapping[str, Any], fields: Fields, required: Collection[str] = ()) -> str | None:
    """Return a description of the first invalid field; None if all are valid."""
    for name, kind in fields.items():
        value = values.get(name)
        if value is None:
            if name in required:
                return f"has no '{name}' ({kind.expected})"
        elif not kind.accepts(value):
            return f"has {shown(value)} in '{name}', expected {kind.expected}"
    return None


def check(
    values: Mapping[str, Any],
    fields: Fields,
    where: object,
    required: Collection[str] = (),
    *,
    remedy: str = REMEDY,
) -> None:
    """Check the fields. Raises CorruptFileError with ``where`` and the field."""
    problem = wrong(values, fields, required)
    if problem is not None:
        raise corrupt(where, problem, remedy)


def shown(value: Any) -> str:
    """Return the text of a value for a message, at most `SHOWN_CHARACTERS` long."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"


MOST_DEPTH = 64
"""Maximum number of nested lists and objects; documents of slurmrl have at most ten levels."""
MOST_DIGITS = 20
"""Maximum number of characters of an integer: enough for 64 bits and a sign."""


def parse(
    text: str | bytes,
    where: object,
    fields: Fields | None = None,
    required: Collection[str] = (),
    *,
    remedy: str = REMEDY,
) -> dict[str, Any]:
    """Return the JSON object in ``text`` with checked ``fields``, of which ``required`` must exist.

    Raises CorruptFileError that names ``where``.
    """
    try:
        values = _DECODER.decode(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:
        raise corrupt(where, f"is not JSON: {error}", remedy) from error
    if not isinstance(values, dict):
        raise corrupt(where, "does not hold a JSON object", remedy)
    if too_deep(values):
        raise corrupt(where, f"is nested more than {MOST_DEPTH} levels deep", remedy)
    check(values, fields or {}, where, required, remedy=remedy)
    return values


def read(
    path: Path,
    fields: Fields | None = None,
    required: Collection[str] = (),
    *,
    calls: SystemCalls = REAL,
) -> dict[str, Any]:
    """Read and `parse` a file. Raises FileNotFoundError, CorruptFileError, EnvironmentFailure."""
    return parse(atomic.read(path, calls=calls), path, fields, required)


@contextmanager
def expecting(where: object) -> Iterator[None]:
    """Turn errors about missing fields or wrong types in the block into CorruptFileError."""
    try:
        yield
    except SlurmrlError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise corrupt(where, f"has missing or invalid fields ({error!r})") from error


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:MOST_DIGITS]}… is too large")
    return value


def _bounded(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"the number {text[:MOST_DIGITS]}… is too long")
    return int(text)


_DECODER = json.JSONDecoder(
    parse_float=_finite, parse_int=_bounded, parse_constant=lambda constant: None
)
"""Decoder that reads NaN and Infinity as null. Python writes both words, which are not JSON."""


def too_deep(value: Any) -> bool:
    below = [value]
    for _ in range(MOST_DEPTH):
        inner = (one.values() if isinstance(one, dict) else one for one in below)
        below = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not below:
            return False
    return True


class Dataclass(Protocol):
    """Any dataclass, for annotations."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


D = TypeVar("D", bound=Dataclass)


class _Form(NamedTuple):
    """Description of the values of one type in JSON."""

    accepted: FieldType
    read: Callable[[Any], Any]
    """Function that makes the value from accepted JSON."""


def to_json(value: Dataclass) -> dict[str, Any]:
    """Return the JSON object of a dataclass, without fields that have their default value."""
    return {
        field.name: _plain(content)
        for field in fields(value)
        if (content := getattr(value, field.name)) != field.default
    }


def from_json(
    kind: type[D], values: Mapping[str, Any], where: object, *, remedy: str = REMEDY
) -> D:
    """Check an object and return its dataclass.

    Raises CorruptFileError that names ``where`` and the field.
    """
    check(values, _accepted(kind), where, _required(kind), remedy=remedy)
    return _read(kind, values)


def shape(kind: type[Dataclass]) -> FieldType:
    """Return the type of a field whose value is an object of this dataclass.

    The annotations are read at the first check, because reading them is slow and many documents
    lack the field.
    """
    names = ", ".join(field.name for field in fields(kind))
    return FieldType(f"an object with {names}", lambda value: _form(kind).accepted.accepts(value))


@cache
def _required(kind: type[Dataclass]) -> Collection[str]:
    return tuple(
        field.name
        for field in fields(kind)
        if field.default is MISSING and field.default_factory is MISSING
    )


@cache
def _accepted(kind: type[Dataclass]) -> Fields:
    return {name: form.accepted for name, form in _forms(kind).items()}


def _plain(value: Any) -> Any:
    """Return a value with dataclasses converted to JSON objects."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(value)
    if isinstance(value, tuple) and value and is_dataclass(value[0]):  # All items have one type.
        return [_plain(item) for item in value]
    return value


def _read(kind: type[D], values: Mapping[str, Any]) -> D:
    given = {
        name: form.read(values[name])
        for name, form in _forms(kind).items()
        if values.get(name) is not None
    }
    return kind(**given)


@cache
def _forms(kind: type[Dataclass]) -> Mapping[str, _Form]:
    return {name: _form(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}


def _form(hint: Any) -> _Form:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _Form(arguments[1], _form(arguments[0]).read)
    if hint in _SCALARS:
        return _Form(_SCALARS[hint], lambda value: value)
    if is_dataclass(hint) and isinstance(hint, type):
        return _Form(table(_accepted(hint), _required(hint)), partial(_read, hint))
    if origin in (Union, UnionType):  # A missing field means None.
        return _form(next(option for option in arguments if option is not type(None)))
    if origin is tuple and arguments[-1] is Ellipsis:
        item = _form(arguments[0])
        return _Form(list_of(item.accepted), lambda values: tuple(map(item.read, values)))
    if origin is tuple:  # The tuple has a fixed number of scalars.
        return _Form(items(*(_form(argument).accepted for argument in arguments)), tuple)
    if origin is Mapping:
        content = _form(arguments[1])
        return _Form(
            each(content.accepted),
            lambda values: {key: content.read(value) for key, value in values.items()},
        )
    raise TypeError(f"no JSON form of {hint}")


_SCALARS: Mapping[Any, FieldType] = {
    bool: FLAG,
    int: INTEGER,
    float: NUMBER,
    str: TEXT,
    Any: FieldType("anything", lambda value: True),
}


FIRST_BYTES = 64 << 10
"""Size of the first chunk that `LineFile.backward` reads; this chunk often suffices."""
CHUNK_BYTES = 1 << 20
LINE_BYTES = 8 << 20


class LineFile:
    """An open file; ``size`` is its size when it was opened."""

    def __init__(self, descriptor: int, calls: SystemCalls) -> None:
        self.size = os.fstat(descriptor).st_size
        self.offset = 0
        """Offset of the first line that `forward` has not yielded."""
        self._descriptor = descriptor
        self._calls = calls

    def forward(
        self, start: int = 0, stop: int | None = None, *, torn: bool = False
    ) -> Iterator[bytes]:
        """Yield the complete lines between two offsets.

        With ``torn``, also yield an incomplete last line and the parts of lines that are longer
        than `LINE_BYTES`. Otherwise skip them.
        """
        stop = self.size if stop is None else min(stop, self.size)
        self.offset = start
        rest, skip = b"", False
        while start < stop and (data := self._read(start, min(stop - start, CHUNK_BYTES))):
            start += len(data)
            *whole, rest = (rest + data).split(b"\n")
            if whole:
                yield from whole[skip:]
                skip = False
            self.offset = start - len(rest)
            if skip or len(rest) > LINE_BYTES or (torn and start == stop and rest):
                if torn:
                    yield rest
                rest, skip, self.offset = b"", not torn, start

    def first(self, count: int) -> bytes:
        """Return up to ``count`` bytes from the start."""
        return self._read(0, min(count, self.size))

    def backward(self, stop: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, line) of the complete lines from the last line back to offset ``stop``."""
        start, rest, chunk = self.size, b"", min(FIRST_BYTES, CHUNK_BYTES)
        skip = True  # The text after the last line end is an incomplete line.
        while start > stop:
            end = start + len(rest)
            start = max(stop, start - chunk)
            chunk = min(2 * chunk, CHUNK_BYTES)
            rest, *whole = (self._read(start, end - start - len(rest)) + rest).split(b"\n")
            for line in reversed(whole):
                end -= len(line)
                if not skip:
                    yield end, line
                skip = False
                end -= 1
            if skip or len(rest) > LINE_BYTES:
                rest, skip = b"", True
        if stop == 0 and not skip:
            yield 0, rest

    def _read(self, offset: int, count: int) -> bytes:
        return self._calls.pread(self._descriptor, count, offset)


class LineWriter:
    """Appends lines to a file that no other process writes.

    Each write closes the file, so that other hosts see the lines.
    """

    def __init__(self, path: Path, *, calls: SystemCalls = REAL) -> None:
        self.path = path
        self.size = 0
        """Size of the file after the last write."""
        self._calls = calls
        self._torn = False
        """Whether the last write failed, perhaps in the middle of a line."""

    def write(self, data: bytes) -> int:
        """Append lines and return the offset at which they begin.

        Raises EnvironmentFailure; the write can be retried.
        """
        ended = b"\n" if self._torn else b""
        self._torn = True
        start = atomic.append(self.path, ended + data, calls=self._calls) + len(ended)
        self._torn = False
        self.size = start + len(data)
        return start


@contextmanager
def opened(path: Path, *, calls: SystemCalls = REAL) -> Iterator[LineFile]:
    """Open a line file.

    Raises FileNotFoundError, EnvironmentFailure, and CorruptFileError if it is not a regular file.
    """
    try:
        with opened_file(path, os.O_RDONLY, calls) as descriptor:
            yield LineFile(descriptor, calls)
    except (FileNotFoundError, EnvironmentFailure):
        raise
    except OSError as error:
        raise unreadable(error, path, MOVE_AWAY) from error
