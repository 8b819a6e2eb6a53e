"""A JSONL file: one object per line, each with a unique id. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from slurmrl.data.text import wrong_text
from slurmrl.errors import ConfigError, EnvironmentFailure, Problem

MOST_PROBLEMS = 20
"""Maximum number of problems to report for a file."""


@dataclass(frozen=True)
class Records:
    """``ids[i]`` names ``rows[i]``; ``fingerprint`` changes with the file's bytes."""

    rows: tuple[dict[str, Any], ...]
    ids: tuple[str, ...]
    lines: tuple[int, ...]
    """The row's line number, from 1."""
    fingerprint: str
    whole: bool = True
    """Whether the file was read to its end."""


def read_records(path: Path, id_key: str, *, most_bytes: int | None = None) -> Records:
    """Read all rows, or the complete lines in the first ``most_bytes``. If no row has an id, the
    line numbers are the ids. Blank lines are skipped.

    :raises ConfigError: lines that are not JSON objects, missing or duplicate ids, an empty file;
        each problem names its line.
    :raises EnvironmentFailure: the file cannot be read.
    """
    content, whole = _read(path, most_bytes)
    problems: list[Problem] = []
    numbered = _parse(content, path, problems)
    rows = tuple(row for _, row in numbered)
    lines = tuple(number for number, _ in numbered)
    ids = _ids(numbered, path, id_key, problems)
    if not rows and not problems:
        problems.append(Problem(str(path), "", "the file holds no rows"))
    if problems:
        raise ConfigError(tuple(problems[:MOST_PROBLEMS]))
    return Records(rows, ids, lines, blake2b(content, digest_size=16).hexdigest(), whole)


def _read(path: Path, most_bytes: int | None) -> tuple[bytes, bool]:
    """The file's bytes, or its first lines; and whether that is all."""
    try:
        with path.open("rb") as file:
            if most_bytes is None:
                return file.read(), True
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise EnvironmentFailure(f"cannot read dataset {path}: {error.strerror}") from error
    if len(content) <= most_bytes:
        return content, True
    return content[: content.rfind(b"\n") + 1], False


def _parse(content: bytes, path: Path, problems: list[Problem]) -> list[tuple[int, dict[str, Any]]]:
    numbered = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except RecursionError:
            problems.append(Problem(f"{path}:{number}", "", "not JSON: nested too deeply"))
            continue
        except ValueError as error:
            problems.append(Problem(f"{path}:{number}", "", f"not JSON: {error}"))
            continue
        if isinstance(row, dict):
            numbered.append((number, row))
        else:
            problems.append(Problem(f"{path}:{number}", "", "must be a JSON object"))
    return numbered


def _ids(
    numbered: list[tuple[int, dict[str, Any]]], path: Path, id_key: str, problems: list[Problem]
) -> tuple[str, ...]:
    if not any(id_key in row for _, row in numbered):
        return tuple(str(number) for number, _ in numbered)
    first: dict[str, int] = {}
    for number, row in numbered:
        name = row.get(id_key)
        where = f"{path}:{number}"
        if name is None:
            problems.append(Problem(where, id_key, "missing here, though other lines have it"))
        elif isinstance(name, bool) or not isinstance(name, int | str):
            problems.append(Problem(where, id_key, "must be a string or a whole number"))
        elif isinstance(name, str) and (message := wrong_text(name)):
            problems.append(Problem(where, id_key, message))
        elif str(name) in first:
            message = f"'{name}' is already the id of line {first[str(name)]}"
            problems.append(Problem(where, id_key, message))
        else:
            first[str(name)] = number
    return tuple(first)
