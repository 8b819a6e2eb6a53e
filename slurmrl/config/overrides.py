"""Overrides of the form ``dotted.key=value`` from the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from ruamel.yaml.nodes import ScalarNode

from slurmrl.config.problems import section_at
from slurmrl.config.schema import Config
from slurmrl.config.source import COMMAND_LINE, Builder, KeyPath, Source, compose, dotted
from slurmrl.errors import ConfigError, Problem

NULL: Final = "tag:yaml.org,2002:null"
_KEY: Final = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")


def apply(source: Source, overrides: Sequence[str]) -> None:
    """Apply each override; the last one of a key wins. A value is parsed as YAML, so ``a.b=[1, 2]``
    is a list and ``a.b=`` is null; a whole section replaces the file's. A setting that is a text
    takes a single value as it stands: ``trial=007``. Errors are added to the source's problems."""
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not _KEY.fullmatch(key):
            source.problems.append(
                Problem(COMMAND_LINE, "", f"{text!r}: expected dotted.key=value")
            )
            continue
        _set(source, tuple(key.split(".")), value)


def _set(source: Source, path: KeyPath, text: str) -> None:
    try:
        node = compose(text, COMMAND_LINE)
    except ConfigError as error:
        source.problems += [problem._replace(key=dotted(path)) for problem in error.problems]
        return
    section = _section(source, path)
    if section is None:
        return
    _forget(source, path)
    source.marks[path] = COMMAND_LINE
    value = None if node is None else Builder(source, file=None).value(node, path)
    plain = isinstance(node, ScalarNode) and node.style is None and node.tag != NULL
    section[str(path[-1])] = node.value if node and plain and _is_text(path) else value


def _is_text(path: KeyPath) -> bool:
    """Return whether a setting is a text, in which 007 and no stand for themselves."""
    owner = section_at(Config, path[:-1])
    field = owner.model_fields.get(str(path[-1])) if owner else None
    return field is not None and set(_types(field.annotation)) - {type(None)} == {str}


def _types(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation allows."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        for option in get_args(annotation):
            yield from _types(option)
    else:
        yield annotation


def _section(source: Source, path: KeyPath) -> dict[str, Any] | None:
    """The values of the section that contains a key; a missing section is created."""
    section = source.values
    for length, part in enumerate(path[:-1], start=1):
        below = section.get(str(part))
        if below is None:
            below = section[str(part)] = {}
            source.marks.setdefault(path[:length], COMMAND_LINE)
        if not isinstance(below, dict):
            message = f"{dotted(path[:length])} is a value ({below!r}), not a section"
            source.problems.append(Problem(COMMAND_LINE, dotted(path), message))
            return None
        section = below
    return section


def _forget(source: Source, path: KeyPath) -> None:
    """Drop the marks of the replaced value: its lines do not apply to the new one."""
    for old in [mark for mark in source.marks if mark[: len(path)] == path]:
        del source.marks[old]
