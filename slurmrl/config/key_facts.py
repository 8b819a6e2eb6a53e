"""Facts about the keys of the configuration, from the schemas and their docstrings.

The reference pages, ``slurmrl explain`` and shell completion show these facts. A docstring may end
with two marked parts: ``Default: …``, in place of the default in the schema, and
``Example: `YAML```.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slurmrl.config.problems import descriptions, keys, names_sections, section_of, types
from slurmrl.config.schema import Config
from slurmrl.config.schema.base import IsHubPath, IsPath, Unit
from slurmrl.config.source import KeyPath

NAMED: Final = "<name>"
"""Part of a path that stands for a name of the user's choice."""
REQUIRED: Final = "required"
OF_KEYS: Final = "defaults of its keys"
"""Default of an optional section."""
_EXAMPLE: Final = re.compile(r"\s*Example:\s+`([^`]+)`\.?\s*\Z")
_DEFAULT: Final = re.compile(r"(?:\A|\s)Default:\s+")
_DETAIL: Final = re.compile(r" (?:[≥>≤<(]|from |or )")
_BASES: Final = {int: "integer", float: "number", bool: "boolean", str: "string"}
_SIGNS: Final = {Gt: ("gt", ">"), Ge: ("ge", "≥"), Lt: ("lt", "<"), Le: ("le", "≤")}
_UNITS: Final = {
    "_s": "seconds",
    "_seconds": "seconds",
    "_mib": "MiB",
    "_gib": "GiB",
    "_steps": "steps",
    "_epochs": "epochs",
    "_tokens": "tokens",
    "_fps": "frames per second",
}
"""Unit by the suffix of a key; a `Unit` in the key's type takes precedence."""


@dataclass(frozen=True)
class KeyFacts:
    """One key of the configuration."""

    path: KeyPath
    kind: str
    """Type in YAML's words, with bounds."""
    default: str
    """Default in YAML or in words; `REQUIRED` if there is none."""
    meaning: str
    """Meaning of the key in Markdown."""
    example: str
    """Example value in YAML; empty for a mapping without an example."""
    unit: str = ""
    values: tuple[str, ...] = ()
    """Allowed values of a type with few values."""
    section: type[BaseModel] | None = None
    named: bool = False
    """Whether the value is a mapping from names to sections."""
    presets: Mapping[str, str] = field(default_factory=dict)
    """Default for each value of ``algorithm.name`` that changes the default."""

    @property
    def name(self) -> str:
        return str(self.path[-1])

    @property
    def key(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def defaults(self) -> str:
        """The default, and each other default with the algorithms that set it."""
        others: dict[str, list[str]] = {}
        for name, value in self.presets.items():
            others.setdefault(value, []).append(f"`{name}`")
        own = (f"{value} for {', '.join(names)}" for value, names in others.items())
        return "; ".join([self.default, *own])

    @property
    def brief(self) -> str:
        """Type of the value without bounds and choices."""
        kind = "string" if self.kind.startswith("one of") else self.kind
        return _DETAIL.split(kind, maxsplit=1)[0]

    @property
    def inside(self) -> KeyPath:
        """Path under which the keys of the section are found."""
        return (*self.path, NAMED) if self.named else self.path


def facts_of(
    section: type[BaseModel], path: KeyPath = (), presets: Mapping[str, Any] | None = None
) -> list[KeyFacts]:
    """Return the facts of each key of a section, in the order of the schema.

    ``presets`` maps the name of an algorithm to its settings of the section.
    """
    texts = descriptions(section)
    return [
        _facts(
            (*path, key),
            one,
            texts.get(attribute, ""),
            _others(one, attribute, presets or {}),
            getattr(section, "null_means", ""),
        )
        for (key, one), attribute in zip(keys(section), section.model_fields, strict=True)
    ]


def preset_settings(schema: type[BaseModel], names: Sequence[str]) -> dict[str, Any]:
    """Return the settings that an ``algorithm`` section has with only its name, for each name."""
    return {name: schema.model_validate({"name": name, "batch_size": 1}) for name in names}


def _others(one: FieldInfo, attribute: str, presets: Mapping[str, Any]) -> dict[str, str]:
    if one.is_required() or attribute == "name" or section_of(one.annotation) is not None:
        return {}
    plain = json.dumps(one.get_default(call_default_factory=True))
    values = {name: json.dumps(getattr(settings, attribute)) for name, settings in presets.items()}
    return {name: f"`{value}`" for name, value in values.items() if value != plain}


def _facts(
    path: KeyPath, one: FieldInfo, text: str, presets: dict[str, str], null_means: str
) -> KeyFacts:
    section, named = section_of(one.annotation), names_sections(one.annotation)
    meaning, default, example = parts_of(text)
    values = choices(one.annotation)
    if section is not None:
        kind = "mapping of sections" if named else "section"
        example = example or parts_of(section.__doc__ or "")[2]
    else:
        kind = kind_of(one.annotation, one.metadata)
    return KeyFacts(
        path=path,
        kind=kind,
        default=default or _default(one, null_means),
        meaning=meaning or (parts_of(section.__doc__ or "")[0] if section else ""),
        example=example or _example(one, values),
        unit=_unit(str(path[-1]), one) if section is None else "",
        values=values,
        section=section,
        named=named,
        presets=presets,
    )


def parts_of(docstring: str) -> tuple[str, str, str]:
    """Return the meaning, the default in words and the example of a docstring.

    A missing part is an empty string.
    """
    text = "\n".join(line.strip() if line.strip() else "" for line in docstring.strip().split("\n"))
    example = ""
    if found := _EXAMPLE.search(text):
        text, example = text[: found.start()], found[1]
    meaning, *rest = _DEFAULT.split(text, maxsplit=1)
    default = " ".join(rest[0].split()).removesuffix(".") if rest else ""
    return meaning.strip(), default, " ".join(example.split())


def _default(one: FieldInfo, null_means: str) -> str:
    if one.is_required():
        return REQUIRED
    default = one.get_default(call_default_factory=True)
    if default is None and null_means:
        return null_means
    if isinstance(default, BaseModel):
        return OF_KEYS
    if section_of(one.annotation) is not None:
        return "none"
    return f"`{json.dumps(default)}`"


def _example(one: FieldInfo, values: Sequence[str]) -> str:
    """Return an example: the other boolean, an informative default, or the first known value."""
    default = None if one.is_required() else one.get_default(call_default_factory=True)
    if default not in (None, "", (), {}) and not isinstance(default, BaseModel):
        return json.dumps(not default if isinstance(default, bool) else default)
    return values[0] if values else ""


def _unit(name: str, one: FieldInfo) -> str:
    for mark in (*one.metadata, *_marks(one.annotation)):
        if isinstance(mark, Unit):
            return mark.name
    return next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")


def _marks(annotation: Any) -> Iterator[Any]:
    """Yield the marks of the types in a union such as ``PositiveInt | None``."""
    if get_origin(annotation) is Annotated:
        yield from get_args(annotation)[1:]
    elif get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            yield from _marks(each)


def choices(annotation: Any) -> tuple[str, ...]:
    """Return the allowed values of a type with few values, as in YAML; empty for other types."""
    found: list[str] = []
    for kind in types(annotation):
        found += ("true", "false") if kind is bool else ()
        found += map(str, get_args(kind)) if get_origin(kind) is Literal else ()
    return tuple(found)


def kind_of(annotation: Any, marks: Sequence[Any] = (), *, plural: bool = False) -> str:
    """Return the type of a value in YAML's words, such as ``list of strings``; omit null."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind_of(arguments[0], (*arguments[1:], *marks), plural=plural)
    if origin in (Union, UnionType):
        kinds = [each for each in arguments if each is not NoneType]
        if len(kinds) == 1:
            return kind_of(kinds[0], marks, plural=plural)
        return " or ".join(kind_of(each, plural=plural) for each in kinds)
    if origin is Literal:
        return f"one of {', '.join(f'`{choice}`' for choice in arguments)}"
    if origin is tuple:
        several = arguments[-1] is Ellipsis
        count = "" if several else f"{len(arguments)} "
        return f"list{'s' if plural else ''} of {count}{kind_of(arguments[0], plural=True)}"
    if origin is dict:
        return "mappings" if plural else "mapping"
    base = _BASES[annotation] + ("s" if plural else "")
    if any(isinstance(mark, IsHubPath) for mark in marks):
        return f"{base} (path or name on the hub)"
    if any(isinstance(mark, IsPath) for mark in marks):
        return f"{base} (path)"
    return " ".join([base, *_bounds(marks, whole=annotation is int)])


def _bounds(marks: Sequence[Any], *, whole: bool) -> list[str]:
    found = {type(mark): _number(getattr(mark, _SIGNS[type(mark)][0])) for mark in _limits(marks)}
    if whole and Gt in found:
        found[Ge] = str(int(found.pop(Gt)) + 1)
    if Ge in found and Le in found:
        return [f"from {found[Ge]} to {found[Le]}"]
    shown = ", ".join(f"{_SIGNS[kind][1]} {bound}" for kind, bound in found.items())
    return [shown] if shown else []


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _limits(marks: Sequence[Any]) -> Iterator[Any]:
    """Yield the bounds in a list of annotations; a ``Field(...)`` may contain several bounds."""
    for mark in marks:
        if isinstance(mark, FieldInfo):
            yield from _limits(mark.metadata)
        elif type(mark) in _SIGNS:
            yield mark


def nested(path: KeyPath, value: str) -> str:
    """Return YAML that sets the key at ``path`` to a value, which is YAML too."""
    lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(path)]
    return "\n".join(lines) + (f" {value}" if value else "")


def find(
    schema: type[BaseModel],
    path: KeyPath,
    prefix: KeyPath = (),
    presets: Mapping[str, Any] | None = None,
) -> KeyFacts | None:
    """Return the facts of the key at ``path`` in a schema; None for an unknown key.

    If the user chooses a name in the path, any string matches this part of the path.
    """
    own = {one.name: one for one in facts_of(schema, prefix, presets)}
    one, rest = own.get(str(path[0])), path[1:]
    if one is None or not rest:
        return one
    if one.named:
        one = replace(one, path=(*one.path, rest[0]), kind="section", named=False)
        rest = rest[1:]
    if not rest:
        return one
    if one.section is None:
        return None
    below = {name: getattr(values, str(path[0])) for name, values in (presets or {}).items()}
    return find(one.section, rest, one.inside, below)


def children(parent: KeyPath, algorithms: Sequence[type[BaseModel]]) -> list[KeyFacts]:
    """Return the keys of the section at ``parent``; none if there is no such section.

    ``algorithms`` has the schemas of the ``algorithm`` section, which has the keys of all schemas.
    """
    if parent[:1] != ("algorithm",):
        one = find(Config, parent) if parent else None
        section = one.section if one is not None else None if parent else Config
        return [] if section is None or (one and one.named) else facts_of(section, parent)
    found: dict[str, KeyFacts] = {}
    for schema in algorithms:
        one = find(schema, parent[1:], parent[:1]) if parent[1:] else None
        section = one.section if one is not None else None if parent[1:] else schema
        for each in facts_of(section, parent) if section is not None else ():
            found.setdefault(each.name, each)
    return list(found.values())
