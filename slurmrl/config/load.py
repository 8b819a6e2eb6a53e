"""Load a configuration from a file and overrides, validate it, and dump it."""

from __future__ import annotations

import copy
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from slurmrl import log
from slurmrl.config import overrides as command_line
from slurmrl.config.problems import drop_removed, problems_from
from slurmrl.config.schema import Config, Profile
from slurmrl.config.schema.base import IsHubPath, IsPath
from slurmrl.config.schema.model import TRIAL_PREFIX
from slurmrl.config.source import RESOLVED, KeyPath, Source, read
from slurmrl.config.written import as_written
from slurmrl.errors import ConfigError, EnvironmentFailure, Problem
from slurmrl.fsio import ownership
from slurmrl.fsio.failures import NO_FILE
from slurmrl.hub import reference as hub

logger = log.get(__name__)

M = TypeVar("M", bound=BaseModel)
Derive: TypeAlias = Callable[[Source], None]
"""Makes another configuration of a file's values, in place."""


def load(
    path: Path,
    overrides: Sequence[str] = (),
    derive: Derive | None = None,
    profile: Path | None = None,
) -> Source:
    """Read a file, put a site ``profile`` under it, perhaps ``derive`` another configuration of
    both, and apply the overrides. Raises ConfigError if a file cannot be read; ``parse`` reports
    all other problems, which are collected in ``problems``."""
    source = read(path)
    if profile is not None:
        put_under(source, profile)
    if derive is not None:
        derive(source)
    command_line.apply(source, overrides)
    _clear(source.values, Config)
    drop_removed(source.values)
    return source


def load_profile(path: Path) -> Profile:
    """A site profile with absolute paths. Raises ConfigError and OwnershipError."""
    source, profile = _read_profile(path)
    if source.problems or profile is None:
        raise ConfigError(tuple(source.problems))
    return profile


def put_under(source: Source, profile: Path) -> None:
    """Give a configuration the values of a site profile that it does not set itself. A profile with
    problems only adds these. Raises ConfigError and OwnershipError if it cannot be read."""
    below, _ = _read_profile(profile)
    source.profile = profile
    source.problems += below.problems
    if not source.problems:
        _merge(source, source.values, below, below.values, ())


def _read_profile(path: Path) -> tuple[Source, Profile | None]:
    for warning in ownership.check_file(path):
        logger.warning("profile: %s", warning)
    source = read(path)
    drop_removed(source.values)
    profile, problems = validate(Profile, source)
    source.problems += problems
    return source, profile


def _merge(
    source: Source,
    values: dict[str, Any],
    below: Source,
    defaults: dict[str, Any],
    prefix: KeyPath,
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
    """Drop each null whose setting has a default but takes no null: it is as if left out."""
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
    """The configuration with absolute paths. Raises ConfigError with all problems at once."""
    config, problems = validate(Config, source)
    problems = [*source.problems, *problems]
    if problems or config is None:
        raise ConfigError(tuple(problems))
    return config


def validate(
    schema: type[M], source: Source, prefix: KeyPath = ()
) -> tuple[M | None, list[Problem]]:
    """Check the values at ``prefix`` against a schema.

    If there are problems, return them with the model that has defaults in place of the wrong
    values, if that is valid, so that further checks can run and be reported together.
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
    """Read back what ``dump`` wrote. Raises ConfigError for its content, and EnvironmentFailure
    where the file system does not give it."""
    try:
        return parse(load(path))
    except ConfigError as error:
        reason = error.__cause__
        if isinstance(reason, OSError) and reason.errno not in NO_FILE:
            raise EnvironmentFailure(str(error)) from reason
        raise


def dump(config: Config) -> str:
    """The configuration as YAML with every field."""
    stream = io.StringIO()
    yaml = YAML(pure=True)
    yaml.width = 100
    yaml.dump(_writable(config.model_dump()), stream)
    return f"{RESOLVED}\n{stream.getvalue()}"


def _writable(value: Any) -> Any:
    """The values with lists for tuples, and with quotes around texts that need them: those with
    line breaks of YAML 1.1 or control characters."""
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    if isinstance(value, str) and not value.isprintable():
        return DoubleQuotedScalarString(value)
    return value


def _remove(values: Any, location: KeyPath) -> None:
    """Drop the value at a location, or the list that contains it."""
    for part in location[:-1]:
        below = values.get(part)
        if not isinstance(below, dict):
            values.pop(part, None)
            return
        values = below
    if location:
        values.pop(location[-1], None)


def _resolve_paths(model: M, source: Source, prefix: KeyPath) -> M:
    """The model with every path made absolute."""
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
    """Yield the paths of a model, with their keys."""
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
    """The absolute path, or the repository of the hub; ``org/name`` is one if there is no such
    path."""
    if not text or (may_be_hub and text.startswith(hub.PREFIX)):
        return text
    if scheme := re.match(r"([a-z][a-z0-9+.-]*)://", text, re.IGNORECASE):
        remedy = "write the path alone" if scheme[1].lower() == "file" else "copy it here first"
        message = f"'{text}' is a URL, but files and folders are read by their paths: {remedy}"
        if may_be_hub:
            message += f"; {hub.PREFIX}org/name is a repository of the Hugging Face hub"
        raise ConfigError((source.problem(key, message),))
    path = _absolute(text, source, key)
    return f"{hub.PREFIX}{text}" if may_be_hub and hub.is_plain(text, Path(path)) else path


def _absolute(text: str, source: Source, key: KeyPath) -> str:
    return os.path.abspath(source.folder(key) / text)


def _is_path(field: FieldInfo, kind: type[IsPath] = IsPath) -> bool:
    marked = any(isinstance(mark, kind) for mark in field.metadata)
    return marked or _holds_path(field.annotation, kind)


def _holds_path(annotation: Any, kind: type[IsPath]) -> bool:
    marks = getattr(annotation, "__metadata__", ())
    return any(isinstance(mark, kind) for mark in marks) or any(
        _holds_path(argument, kind) for argument in get_args(annotation)
    )
