"""Overrides of the form ``dotted.key=value`` from the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from ruamel.yaml.nodes import Node, ScalarNode

from slurmrl.config.problems import keys, section_at
from slurmrl.config.schema import Config
from slurmrl.config.source import COMMAND_LINE, Builder, KeyPath, Mark, Source, compose, dotted
from slurmrl.config.written import types
from slurmrl.errors import ConfigError, Problem

NULLS: Final = ("", "~", "null", "Null", "NULL")
_KEY: Final = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")


def apply(source: Source, overrides: Sequence[str]) -> None:
    """Apply each override; the last one of a key wins. A value is parsed as YAML, so ``a.b=[1, 2]``
    is a list and ``a.b=`` is null; a whole section replaces the file's. A setting that is a text
    takes the characters as they stand: ``trial=007``, ``dataset.prompt_template={question}``. Only
    null clears it, and quotes around the whole are removed. Errors are added to the source's
    problems."""
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
    takes_text = _is_text(path) and text.strip() not in NULLS
    node = None
    try:
        node = compose(text, COMMAND_LINE)
    except ConfigError as error:
        if not takes_text:
            source.problems += [problem._replace(key=dotted(path)) for problem in error.problems]
            return
    section = _section(source, path)
    if section is None:
        return
    _forget(source, path)
    source.marks[path] = Mark(COMMAND_LINE)
    builder = Builder(source, file=None)
    if takes_text and not _is_quoted(node, text):
        section[str(path[-1])] = builder.text(text, path)
    else:
        section[str(path[-1])] = None if node is None else builder.value(node, path)


def _is_quoted(node: Node | None, text: str) -> bool:
    """Return whether the text is one string of YAML in quotes."""
    whole = text.strip()
    style = node.style if isinstance(node, ScalarNode) else None
    return style in ("'", '"') and len(whole) > 1 and whole[0] == whole[-1] == style


def _is_text(path: KeyPath) -> bool:
    """Return whether a setting is a text, in which 007 and no stand for themselves."""
    owner = section_at(Config, path[:-1])
    field = dict(keys(owner)).get(str(path[-1])) if owner else None
    return field is not None and set(types(field.annotation)) - {type(None)} == {str}


def _section(source: Source, path: KeyPath) -> dict[str, Any] | None:
    """The values of the section that contains a key; a missing section is created."""
    section = source.values
    for length, part in enumerate(path[:-1], start=1):
        below = section.get(str(part))
        if below is None:
            below = section[str(part)] = {}
            source.marks.setdefault(path[:length], Mark(COMMAND_LINE))
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
