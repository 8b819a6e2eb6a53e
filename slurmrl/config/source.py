"""A YAML file as plain values, with the line of each key.

YAML 1.2: ``1:00:00`` and ``no`` are strings, ``3e-4`` is a number.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from slurmrl.errors import ConfigError, Problem, UnreadableInputError
from slurmrl.fsio.calls import NO_FILE, REAL, opened, read_all

KeyPath: TypeAlias = tuple[str | int, ...]

COMMAND_LINE = "command line"
MOST_BYTES = 1 << 20
MOST_VALUES = 20_000
"""Maximum number of values in a file; an alias counts as all values to which it refers."""
MOST_DEPTH = 32
MOST_DIGITS = 300
"""Maximum number of digits of a number, so that the number fits into a float."""
LARGEST = 10**MOST_DIGITS
KEPT_TEXTS = 32
"""Number of cached node trees. A command reads the configuration of its trial up to five times."""
ADVICE = {
    "'\\t'": "; indent with spaces, not tabs",
    "mapping values are not allowed": "; align the line, or quote a value that contains ': '",
    "'<document start>'": "; a configuration has lines of key: value",
}
"""Mapping from a part of the YAML parser's message to advice about the mistake."""
ENCODED = "convert it with iconv, or name a YAML file"
ARCHIVE = ".tar"
RESOLVED = "# The resolved configuration of this run: every setting, absolute paths."
"""First line of the configuration that a trial writes."""


def dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a mapping from dotted keys to all values, such as ``{"actor.optimizer.lr": 0.001}``.

    Lists and empty sections are values.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{key}.")
        else:
            found[key] = value
    return found


class Mark(NamedTuple):
    """The location of a value, and the spelling of a number."""

    where: str
    """Location of the value: ``ppo.yaml:12`` or ``command line``."""
    text: str | None = None
    """The number as the user wrote it (``007``); None for other values."""


@dataclass
class Source:
    """The values of a file, the location of each value, and the problems found while reading."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)
    marks: dict[KeyPath, Mark] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    profile: Path | None = None
    """Site profile that supplied values which the file does not set."""
    resolved: bool = False
    """Whether a trial wrote the file. A dollar sign in its absolute paths is then literal."""

    def where(self, key_path: KeyPath) -> str:
        """Return the location of a key, such as ``ppo.yaml:12`` or ``command line``.

        A missing key has the location of its nearest enclosing section.
        """
        for length in range(len(key_path), 0, -1):
            mark = self.marks.get(key_path[:length])
            if mark is not None:
                return mark.where
        return str(self.path)

    def spelling(self, key_path: KeyPath) -> Any:
        """Return the value at a key, or the spelling of a number as a string."""
        value, mark = value_at(self.values, key_path), self.marks.get(key_path)
        written = mark.text if mark is not None else None
        return value if written is None or isinstance(value, str) else written

    def writes(self, *key_path: str | int) -> bool:
        """Return whether the key has a value, valid or not; null and "" are no values."""
        return value_at(self.values, key_path) not in (None, "")

    def folder(self, key_path: KeyPath) -> Path:
        """Return the folder to which a path at this key is relative.

        The result is the folder of the file that has the key, or the current directory for a value
        on the command line.
        """
        if self.where(key_path) == COMMAND_LINE:
            return Path.cwd()
        file = self.profile if self.profile and self.is_of_profile(key_path) else self.path
        return file.parent.absolute()

    def is_of_profile(self, key_path: KeyPath) -> bool:
        """Return whether the value at this key comes from the site profile."""
        file, _, _ = self.where(key_path).rpartition(":")
        return self.profile is not None and file == str(self.profile)

    def of_profile(self) -> list[KeyPath]:
        """Return the keys of all values that come from the site profile."""
        return [key for key in _settings(self.values) if self.is_of_profile(key)]

    def problem(self, key_path: KeyPath, message: str) -> Problem:
        return Problem(self.where(key_path), dotted(key_path), message)


def value_at(values: Any, key_path: KeyPath) -> Any:
    """Return the value at a key; None if the key is not set."""
    try:
        for part in key_path:
            values = None if isinstance(values, str) else values[part]
    except (LookupError, TypeError):
        return None
    return values


def read(path: Path) -> Source:
    """Return a file's values. Raises UnreadableInputError, or ConfigError for invalid YAML."""
    text = _text(path)
    source = Source(path, resolved=text.startswith(RESOLVED))
    node = compose(text, str(path))
    if node is None:
        raise ConfigError((Problem(str(path), "", "the file is empty"),))
    if not isinstance(node, MappingNode):
        raise ConfigError((Problem(f"{path}:1", "", "expected lines of key: value"),))
    source.values = Builder(source, file=str(path)).mapping(node, ())
    return source


def _text(path: Path) -> str:
    if path.suffix == ARCHIVE and path.is_file():
        message = "is an archive, not a configuration: bundles are for slurmrl submit"
        raise ConfigError((Problem(str(path), "", message),))
    try:
        with opened(path, os.O_RDONLY, REAL) as descriptor:
            data = read_all(descriptor, REAL, MOST_BYTES)
            if data is None:
                raise ConfigError((Problem(str(path), "", f"is larger than {MOST_BYTES} bytes"),))
            return data.decode()
    except OSError as error:
        kind = NO_FILE.get(error.errno or 0)
        if kind is None:
            similar = _similar(path) if error.errno == errno.ENOENT else ""
            reason = f"cannot be read: {error.strerror}{similar}"
            raise UnreadableInputError(f"{path}: {reason}") from error
        message = f"is {kind}, not a regular file"
        raise ConfigError((Problem(str(path), "", message),)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            (Problem(str(path), "", f"is not UTF-8 text: {error.reason}; {ENCODED}"),)
        ) from error


def _similar(path: Path) -> str:
    """Return a hint that names another YAML file of a similar name in the folder."""
    others = [file.name for file in path.parent.glob("*.yaml") if file.name != path.name]
    found = get_close_matches(path.name, others, 1)
    return f"; did you mean {path.with_name(found[0])}?" if found else ""


def compose(text: str, name: str) -> Node | None:
    """Return the node tree of one YAML document; None without content. Raises ConfigError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyYAML warns about repeated anchors.
            return _composed(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = name if mark is None or name == COMMAND_LINE else f"{name}:{mark.line + 1}"
        column = "" if mark is None else f" at column {mark.column + 1}"
        said = ", ".join(part for part in (error.context, error.problem) if part)
        advice = next((advice for part, advice in ADVICE.items() if part in said), "")
        message = f"not valid YAML{column}: {said}{advice}"
        raise ConfigError((Problem(where, "", message),)) from error
    except YAMLError as error:
        raise ConfigError(
            (Problem(name, "", f"not valid YAML: {str(error).splitlines()[0]}"),)
        ) from error
    except RecursionError as error:
        raise ConfigError((Problem(name, "", "nested too deeply"),)) from error


@lru_cache(maxsize=KEPT_TEXTS)
def _composed(text: str) -> Node | None:
    """Return the cached node tree; callers must not change it."""
    _check_depth(text)
    return _yaml().compose(text)  # type: ignore[no-any-return]


def _check_depth(text: str) -> None:
    """Raise MarkedYAMLError for deeply nested brackets, which would take minutes to compose."""
    if text.count("[") + text.count("{") <= MOST_DEPTH:
        return
    depth = 0
    for event in _yaml().parse(text):
        depth += isinstance(event, CollectionStartEvent)
        depth -= isinstance(event, CollectionEndEvent)
        if depth > MOST_DEPTH:
            raise MarkedYAMLError(
                problem=f"nested more than {MOST_DEPTH} levels deep", problem_mark=event.start_mark
            )


def _yaml() -> YAML:
    return YAML(typ="safe", pure=True)


class Builder:
    """Turns nodes into plain values, and records locations and problems in a source."""

    def __init__(self, source: Source, file: str | None) -> None:
        """Record locations as lines of ``file``; None records the command line."""
        self._source = source
        self._file = file
        self._constructor = _yaml().constructor
        self._open: set[int] = set()
        self._count = 0

    def value(self, node: Node, path: KeyPath) -> Any:
        self._count += 1
        if self._count > MOST_VALUES:
            message = f"more than {MOST_VALUES} values, with every alias expanded"
            raise ConfigError((Problem(self._where(node), dotted(path), message),))
        if len(path) > MOST_DEPTH:
            return self._reject(path, f"nested more than {MOST_DEPTH} levels deep")
        if isinstance(node, ScalarNode):
            value = self._scalar(node, path)
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._source.marks[path] = Mark(self._source.where(path), str(node.value))
            return value
        if id(node) in self._open:
            return self._reject(path, "an alias must not refer to a value that contains it")
        self._open.add(id(node))
        try:
            if isinstance(node, MappingNode):
                return self.mapping(node, path)
            assert isinstance(node, SequenceNode)
            return self._sequence(node, path)
        finally:
            self._open.discard(id(node))

    def mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                self._reject(path, "a key must be a plain word")
                continue
            key = str(key_node.value)
            here = (*path, key)
            if key in values:
                first = self._source.where(here)
                self._mark(here, key_node)
                self._reject(here, f"duplicate key; first at {first}")
                continue
            self._mark(here, key_node)
            values[key] = self.value(value_node, here)
        return values

    def _sequence(self, node: SequenceNode, path: KeyPath) -> list[Any]:
        items = []
        for index, item in enumerate(node.value):
            self._mark((*path, index), item)
            items.append(self.value(item, (*path, index)))
        return items

    def _scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        if str(node.tag) == "tag:yaml.org,2002:timestamp":
            return node.value
        try:
            value = self._constructor.construct_object(node)
        except (YAMLError, ValueError) as error:
            reason = getattr(error, "problem", None) or error
            return self._reject(path, f"{node.value!r} cannot be read: {reason}")
        if isinstance(value, str):
            return self.text(value, path)
        if isinstance(value, int) and abs(value) > LARGEST:
            return self._reject(path, f"{node.value[:20]}… has more than {MOST_DIGITS} digits")
        if value is None or isinstance(value, bool | int | float):
            return value
        return self._reject(path, f"{node.value!r} has the unsupported type {node.tag}")

    def text(self, text: str, path: KeyPath) -> str | None:
        """Return the string; report a problem and return None if a character is invalid."""
        if is_text(text):
            return text
        self._reject(path, f"{text!r} contains a lone surrogate, which is not a character")
        return None

    def _mark(self, path: KeyPath, node: Node) -> None:
        self._source.marks[path] = Mark(self._where(node))

    def _where(self, node: Node) -> str:
        return f"{self._file}:{node.start_mark.line + 1}" if self._file else COMMAND_LINE

    def _reject(self, path: KeyPath, message: str) -> None:
        self._source.problems.append(self._source.problem(path, message))


def _settings(values: dict[str, Any], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the keys of all values except sections."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _settings(value, (*prefix, key))
        else:
            yield (*prefix, key)


def is_text(value: str) -> bool:
    """Return whether a string can be encoded as UTF-8, unlike a path with other bytes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
