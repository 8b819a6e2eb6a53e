"""Values as their settings take them: texts as they are spelled, paths with their variables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from slurmrl.config.problems import keys
from slurmrl.config.schema.base import HasVariables
from slurmrl.config.source import COMMAND_LINE, KeyPath, Source
from slurmrl.config.variables import expanded
from slurmrl.errors import Problem, UsageError


def as_written(
    schema: type[BaseModel], values: Any, source: Source, prefix: KeyPath
) -> tuple[Any, list[Problem]]:
    """Return a copy of the values at ``prefix`` in which a number of a string setting is its own
    text (``trial: 007``), and ``~`` and variables of a path are replaced, with the problems."""
    problems: list[Problem] = []
    return _written(schema, values, source, prefix, problems), problems


def _written(
    annotation: Any, value: Any, source: Source, key: KeyPath, problems: list[Problem]
) -> Any:
    options = list(types(annotation))
    if isinstance(value, dict):
        sections = [each for each in options if isinstance(each, type)]
        for section in (each for each in sections if issubclass(each, BaseModel)):
            fields = {name: field.rebuild_annotation() for name, field in keys(section)}
            return {
                name: _written(fields.get(name, Any), each, source, (*key, name), problems)
                for name, each in value.items()
            }
        for of_values in (get_args(each)[1] for each in options if get_origin(each) is dict):
            return {
                name: _written(of_values, each, source, (*key, name), problems)
                for name, each in value.items()
            }
    if isinstance(value, list):
        for of_items in (get_args(each)[0] for each in options if get_origin(each) is tuple):
            return [
                _written(of_items, each, source, (*key, index), problems)
                for index, each in enumerate(value)
            ]
    if str in options and type(value) in (int, float) and not {int, float} & set(options):
        value = source.spelling(key)
    if isinstance(value, str) and _has_variables(annotation):
        try:
            return _path(value, source, key)
        except UsageError as error:
            problems.append(source.problem(key, str(error)))
    return value


def types(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation allows, without their marks."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from types(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for option in get_args(annotation):
            yield from types(option)
    else:
        yield annotation


def _has_variables(annotation: Any) -> bool:
    marks = getattr(annotation, "__metadata__", ())
    inner = get_args(annotation)[:1] if marks else ()
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else inner
    return any(isinstance(mark, HasVariables) for mark in marks) or any(
        _has_variables(option) for option in options
    )


def _path(text: str, source: Source, key: KeyPath) -> str:
    """A dollar sign in an absolute path that a trial recorded is part of the path."""
    recorded = source.resolved and source.where(key) != COMMAND_LINE
    return text if recorded and os.path.isabs(text) else expanded(text)
