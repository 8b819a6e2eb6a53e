"""The reference of all settings, as Markdown, from the schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slurmrl.config.problems import keys, section_of
from slurmrl.config.schema import Config
from slurmrl.config.schema.base import IsPath

INTRODUCTION: Final = """\
# Configuration

<!-- Made by scripts/make-docs from the schemas; edit their docstrings instead. -->

One YAML 1.2 file describes a trial. `slurmrl submit CONFIG dotted.key=value …` lays single values
over it: each value is read as YAML (`actor.optimizer.betas=[0.9, 0.99]`), null empties a setting,
and the last one of a key wins. Unknown keys and values that break a rule are refused, all of them
at once.

Relative paths are relative to the configuration's folder, those on the command line and `root` to
the current one. A setting whose default is null may be left out or set to null.
"""

_BASES: Final = {int: "whole number", float: "number", bool: "true or false", str: "text"}
_SIGNS: Final = {Gt: ("gt", ">"), Ge: ("ge", "≥"), Lt: ("lt", "<"), Le: ("le", "≤")}


def reference(algorithms: Mapping[str, type[BaseModel]]) -> str:
    """The whole page; ``algorithms`` are the schemas of the ``algorithm`` section by name."""
    parts = [INTRODUCTION, *_chapters(Config, "", "Top level")]
    for name, schema in algorithms.items():
        parts += _chapters(schema, "algorithm", f"`algorithm` with `name: {name}`")
    return "\n".join(parts)


def _chapters(schema: type[BaseModel], path: str, title: str) -> Iterator[str]:
    """A chapter for each kind of section; one that stands in several places is told once."""
    places: dict[type[BaseModel], list[str]] = {}
    for place, section in _sections(schema, path):
        places.setdefault(section, []).append(place)
    for section, names in places.items():
        heading = title if section is schema else ", ".join(f"`{name}`" for name in names)
        yield _chapter(section, heading)


def _sections(schema: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, schema
    for name, field in schema.model_fields.items():
        below = section_of(field.annotation)
        if below is not None:
            yield from _sections(below, f"{path}.{name}" if path else name)


def _chapter(section: type[BaseModel], heading: str) -> str:
    lines = [f"## {heading}", "", _text(section.__doc__), ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [_row(name, field) for name, field in keys(section)]
    return "\n".join([*lines, ""])


def _row(name: str, field: FieldInfo) -> str:
    below = section_of(field.annotation)
    kind = "section" if below else kind_of(field.annotation, field.metadata)
    meaning = field.description or (below.__doc__ if below else "")
    return (
        f"| `{name}` | {kind} | {_default(field)} | {_text(meaning).replace('|', chr(92) + '|')} |"
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        return "its defaults"
    return f"`{json.dumps(default)}`"


def kind_of(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What a value of this type is, in words; null is left to the default to say."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if any(isinstance(mark, IsPath) for mark in metadata):
        return "path"
    if origin is Annotated:
        return kind_of(arguments[0], arguments[1:])
    if origin in (Union, UnionType):
        return " or ".join(kind_of(each) for each in arguments if each is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of {kind_of(arguments[0])}"
        return f"list of {len(arguments)}: {kind_of(arguments[0])}"
    if origin is dict:
        return "keys and values"
    limits = [
        f"{sign} {_bound(getattr(mark, name))}"
        for mark in _limits(metadata)
        for name, sign in [_SIGNS[type(mark)]]
    ]
    return " ".join([_BASES[annotation], ", ".join(limits)]).strip()


def _bound(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _limits(metadata: Sequence[Any]) -> Iterator[Any]:
    """The bounds among the marks; a ``Field(...)`` inside an annotation holds several."""
    for mark in metadata:
        if isinstance(mark, FieldInfo):
            yield from _limits(mark.metadata)
        elif type(mark) in _SIGNS:
            yield mark


def _text(text: str | None) -> str:
    return " ".join((text or "").split())
