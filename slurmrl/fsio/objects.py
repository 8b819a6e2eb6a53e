"""JSON objects as frozen dataclasses, which are checked when they are read.

The annotation of a field decides which values it accepts: ``int``, ``float``, ``str``, ``bool`` or,
with other bounds, ``Annotated[int, COUNT]`` (see `documents`); ``tuple``, ``Mapping`` and
dataclasses of these; ``Any``. A field with a default may be missing. Unknown fields, such as fields
of a newer version, are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, partial
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

from slurmrl.fsio.documents import (
    FLAG,
    INTEGER,
    NUMBER,
    TEXT,
    Fields,
    FieldType,
    check,
    each,
    items,
    list_of,
    table,
)
from slurmrl.fsio.failures import REMEDY


class Dataclass(Protocol):
    """Any dataclass, for annotations."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


D = TypeVar("D", bound=Dataclass)


class _Form(NamedTuple):
    """How values of one type look in JSON."""

    accepted: FieldType
    read: Callable[[Any], Any]
    """Make the value from accepted JSON."""


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

    The annotations are read at the first check: it takes a while, and many documents lack the
    field.
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
    """Convert the dataclasses in a value; the items of a tuple have one type."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(value)
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
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
        return _Form(_SCALARS[hint], _same)
    if is_dataclass(hint) and isinstance(hint, type):
        return _Form(table(_accepted(hint), _required(hint)), partial(_read, hint))
    if origin in (Union, UnionType):  # also None, which counts as missing
        return _form(next(option for option in arguments if option is not type(None)))
    if origin is tuple and arguments[-1] is Ellipsis:
        item = _form(arguments[0])
        return _Form(list_of(item.accepted), lambda values: tuple(map(item.read, values)))
    if origin is tuple:  # items are scalars
        return _Form(items(*(_form(argument).accepted for argument in arguments)), tuple)
    if origin is Mapping:
        content = _form(arguments[1])
        return _Form(
            each(content.accepted),
            lambda values: {key: content.read(value) for key, value in values.items()},
        )
    raise TypeError(f"no JSON form of {hint}")


def _same(value: Any) -> Any:
    return value


_SCALARS: Mapping[Any, FieldType] = {
    bool: FLAG,
    int: INTEGER,
    float: NUMBER,
    str: TEXT,
    Any: FieldType("anything", lambda value: True),
}
