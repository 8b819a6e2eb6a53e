"""Read, validate and write the configuration.

Overrides on the command line (``dotted.key=value``) replace values of the file, and a site profile
supplies missing values. The type of a setting decides how its value is read: strings keep their
spelling, and paths may contain variables.
"""

from __future__ import annotations

import copy
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Final, TypeAlias, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML
from ruamel.yaml.nodes import Node, ScalarNode
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from slurmrl import log
from slurmrl.config import hub
from slurmrl.config.problems import drop_removed, keys, problems_from, section_at, types
from slurmrl.config.profiles import expanded
from slurmrl.config.schema import Config, Profile
from slurmrl.config.schema.base import HasVariables, IsHubPath, IsPath
from slurmrl.config.schema.roles import TRIAL_PREFIX
from slurmrl.config.source import (
    COMMAND_LINE,
    RESOLVED,
    Builder,
    KeyPath,
    Mark,
    Source,
    compose,
    dotted,
    is_text,
    read,
)
from slurmrl.errors import ConfigError, EnvironmentFailure, Problem, UsageError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import NO_FILE

logger = log.get(__name__)

M = TypeVar("M", bound=BaseModel)
Derive: TypeAlias = Callable[[Source], None]
"""A function that changes the values of a file in place."""


def load(
    path: Path,
    overrides: Sequence[str] = (),
    derive: Derive | None = None,
    profile: Path | None = None,
) -> Source:
    """Read a file, add missing values from a site ``profile``, and apply the overrides.

    If given, ``derive`` changes the merged values before the overrides apply. Raises ConfigError if
    a file cannot be read. Other problems are in `Source.problems`, and `parse` reports them.
    """
    source = read(path)
    if profile is not None:
        put_under(source, profile)
    if derive is not None:
        derive(source)
    apply_overrides(source, overrides)
    _clear(source.values, Config)
    drop_removed(source.values, Config, resolved=source.resolved)
    return source


def load_profile(path: Path) -> Profile:
    """Return a site profile with absolute paths. Raises ConfigError and OwnershipError."""
    source, profile = _read_profile(path)
    if source.problems or profile is None:
        raise ConfigError(tuple(source.problems))
    return profile


def put_under(source: Source, profile: Path) -> None:
    """Add values of a site profile to a configuration that does not set them.

    If the profile has problems, add only its problems. Raises ConfigError and OwnershipError if
    the profile cannot be read.
    """
    below, _ = _read_profile(profile)
    source.profile = profile
    source.problems += below.problems
    if not source.problems:
        _merge(source, source.values, below, below.values, ())


def _read_profile(path: Path) -> tuple[Source, Profile | None]:
    for warning in atomic.check_file_ownership(path):
        logger.warning("profile: %s", warning)
    source = read(path)
    drop_removed(source.values, Profile)
    profile, problems = validate(Profile, source)
    source.problems += problems
    return source, profile


def _merge(
    source: Source, values: dict[str, Any], below: Source, defaults: dict[str, Any], prefix: KeyPath
) -> None:
    for key, value in defaults.items():
        here = (*prefix, key)
        if key not in values:
            values[key] = value
            source.marks.update(
                {at: mark for at, mark in below.marks.items() if at[: len(here)] == here}
            )
        elif isinstance(value, dict) and isinstance(values[key], dict):
            _merge(source, values[key], below, value, here)


def _clear(values: dict[str, Any], schema: type[BaseModel]) -> None:
    """Remove nulls from settings that allow no null and have a default, which then applies."""
    for name, field in schema.model_fields.items():
        value = values.get(name)
        kinds = {field.annotation, *get_args(field.annotation)}
        if name in values and value is None:
            if type(None) not in kinds and not field.is_required():
                del values[name]
        elif isinstance(value, dict):
            for kind in kinds:
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    _clear(value, kind)


def parse(source: Source) -> Config:
    """Return the configuration with absolute paths. Raises ConfigError with all problems."""
    config, problems = validate(Config, source)
    problems = [*source.problems, *problems]
    if problems or config is None:
        raise ConfigError(tuple(problems))
    return config


def validate(
    schema: type[M], source: Source, prefix: KeyPath = ()
) -> tuple[M | None, list[Problem]]:
    """Check the values at ``prefix`` against a schema.

    Return a model and the problems. With problems, the model has defaults in place of wrong values,
    so that further checks can run. The model is None if this is impossible.
    """
    values = source.values
    for part in prefix:
        values = values[str(part)]
    values, problems = as_written(schema, values, source, prefix)
    try:
        return _resolve_paths(schema.model_validate(values), source, prefix), problems
    except ValidationError as error:
        problems += problems_from(error, source, prefix, schema)
        rest = copy.deepcopy(values)
        for details in error.errors():
            missing = details["type"] == "missing"
            _remove(rest, details["loc"][:-1] if missing else details["loc"])
    try:
        return _resolve_paths(schema.model_validate(rest), source, prefix), problems
    except ValidationError:
        return None, problems


def load_resolved(path: Path) -> Config:
    """Return the configuration in a file that `dump` wrote.

    Raises ConfigError for invalid content, EnvironmentFailure if the file cannot be read.
    """
    try:
        return parse(load(path))
    except ConfigError as error:
        reason = error.__cause__
        if isinstance(reason, OSError) and reason.errno not in NO_FILE:
            raise EnvironmentFailure(str(error)) from reason
        raise


def dump(config: Config) -> str:
    """Return the configuration as YAML with every field."""
    stream = io.StringIO()
    yaml = YAML(pure=True)
    yaml.width = 100
    yaml.dump(_writable(config.model_dump()), stream)
    return f"{RESOLVED}\n{stream.getvalue()}"


def _writable(value: Any) -> Any:
    """Return the values with lists in place of tuples, and with quotes around some strings.

    Strings with line breaks or control characters need quotes in YAML 1.1.
    """
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    if isinstance(value, str) and not value.isprintable():
        return DoubleQuotedScalarString(value)
    return value


def _remove(values: Any, location: KeyPath) -> None:
    """Remove the value at a location, or the list that contains the value."""
    for part in location[:-1]:
        below = values.get(part)
        if not isinstance(below, dict):
            values.pop(part, None)
            return
        values = below
    if location:
        values.pop(location[-1], None)


def _resolve_paths(model: M, source: Source, prefix: KeyPath) -> M:
    """Return the model with absolute paths."""
    changes: dict[str, Any] = {}
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        here = (*prefix, name)
        if isinstance(value, BaseModel):
            changes[name] = _resolve_paths(value, source, here)
        elif isinstance(value, str) and _is_path(field) and not value.startswith(TRIAL_PREFIX):
            changes[name] = _located(value, source, here, may_be_hub=_is_path(field, IsHubPath))
        elif isinstance(value, dict):
            changes[name] = {
                key: _resolve_paths(each, source, (*here, key))
                if isinstance(each, BaseModel)
                else each
                for key, each in value.items()
            }
        elif isinstance(value, tuple) and _is_path(field):
            changes[name] = tuple(
                _absolute(text, source, (*here, index)) for index, text in enumerate(value)
            )
    changes = {name: value for name, value in changes.items() if value != getattr(model, name)}
    return model.model_copy(update=changes) if changes else model


def paths_in(model: BaseModel, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield the key and the value of each setting of a model that is a path."""
    for name, field in type(model).model_fields.items():
        value, here = getattr(model, name), (*prefix, name)
        if isinstance(value, BaseModel):
            yield from paths_in(value, here)
        elif isinstance(value, dict):
            for key, each in value.items():
                if isinstance(each, BaseModel):
                    yield from paths_in(each, (*here, key))
        elif _is_path(field) and isinstance(value, str | tuple):
            texts = (
                {here: value}
                if isinstance(value, str)
                else {(*here, index): text for index, text in enumerate(value)}
            )
            yield from texts.items()


def _located(text: str, source: Source, key: KeyPath, *, may_be_hub: bool) -> str:
    """Return the absolute path, or a hub reference if ``text`` is ``org/name`` and not a path."""
    if not text or (may_be_hub and text.startswith(hub.PREFIX)):
        return text
    if scheme := re.match(r"([a-z][a-z0-9+.-]*)://", text, re.IGNORECASE):
        remedy = "write only the path" if scheme[1].lower() == "file" else "copy it here first"
        message = f"'{text}' is a URL, but slurmrl reads only local files and folders: {remedy}"
        if may_be_hub:
            message += f"; {hub.PREFIX}org/name is a repository of the Hugging Face hub"
        raise ConfigError((source.problem(key, message),))
    path = _absolute(text, source, key)
    return f"{hub.PREFIX}{text}" if may_be_hub and hub.is_plain(text, Path(path)) else path


def _absolute(text: str, source: Source, key: KeyPath) -> str:
    path = os.path.abspath(source.folder(key) / text)
    if not is_text(path):
        raise ConfigError((source.problem(key, f"{path!r} is not UTF-8 text: rename the folder"),))
    return path


def _is_path(field: FieldInfo, kind: type[IsPath] = IsPath) -> bool:
    marked = any(isinstance(mark, kind) for mark in field.metadata)
    return marked or _holds_path(field.annotation, kind)


def _holds_path(annotation: Any, kind: type[IsPath]) -> bool:
    marks = getattr(annotation, "__metadata__", ())
    return any(isinstance(mark, kind) for mark in marks) or any(
        _holds_path(argument, kind) for argument in get_args(annotation)
    )


NULLS: Final = ("", "~", "null", "Null", "NULL")
_KEY: Final = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")


def apply_overrides(source: Source, overrides: Sequence[str]) -> None:
    """Apply the overrides in order, so that the last override of a key counts.

    A value is parsed as YAML: ``a.b=[1, 2]`` is a list, and ``a.b=`` is null. A value that is a
    section replaces the section of the file. A string setting takes the value literally, except
    null and quotes around the entire value: ``trial=007``, ``dataset.prompt_template={question}``.
    Add errors to the source's problems.
    """
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
    """Return whether the argument is one quoted YAML string."""
    whole = text.strip()
    style = node.style if isinstance(node, ScalarNode) else None
    return style in ("'", '"') and len(whole) > 1 and whole[0] == whole[-1] == style


def _is_text(path: KeyPath) -> bool:
    """Return whether a setting is a string, so that 007 and no are not parsed as YAML."""
    owner = section_at(Config, path[:-1])
    field = dict(keys(owner)).get(str(path[-1])) if owner else None
    return field is not None and set(types(field.annotation)) - {type(None)} == {str}


def _section(source: Source, path: KeyPath) -> dict[str, Any] | None:
    """Return the values of the section that contains a key; create a missing section."""
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
    """Remove the marks of a replaced value: its line numbers do not apply to the new value."""
    for old in [mark for mark in source.marks if mark[: len(path)] == path]:
        del source.marks[old]


def as_written(
    schema: type[BaseModel], values: Any, source: Source, prefix: KeyPath
) -> tuple[Any, list[Problem]]:
    """Return a copy of the values at ``prefix`` as the user wrote them, and the problems.

    A number becomes a string with its spelling if the setting is a string (``trial: 007``). ``~``
    and variables in paths are replaced.
    """
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


def _has_variables(annotation: Any) -> bool:
    marks = getattr(annotation, "__metadata__", ())
    inner = get_args(annotation)[:1] if marks else ()
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else inner
    return any(isinstance(mark, HasVariables) for mark in marks) or any(
        _has_variables(option) for option in options
    )


def _path(text: str, source: Source, key: KeyPath) -> str:
    """Return a path with its variables replaced. In a trial's recorded path, ``$`` is literal."""
    recorded = source.resolved and source.where(key) != COMMAND_LINE
    return text if recorded and os.path.isabs(text) else expanded(text)
