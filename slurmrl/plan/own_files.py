"""Rewards, types of datasets and parts of episodes that a configuration names by a file:
``judge.py:score``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from slurmrl.config.source import KeyPath, Source
from slurmrl.errors import Problem, UsageError
from slurmrl.plan.own_algorithm import OWN_FILE, own_name

SECTIONS: Final = {"name": {"reward", "episode"}, "type": {"dataset"}}
"""Settings that may name code, with the sections around them."""


def resolve(source: Source) -> tuple[list[Path], list[Problem]]:
    """Replace the names of files in the values by those of their modules. Return the folders of the
    files, and what is wrong with the names."""
    folders: dict[str, Path] = {}
    problems = []
    for section, key, where in list(_names(source.values, ())):
        text = section[key]
        try:
            own = own_name(text, source.folder(where))
            if own is None or own.folder is None:
                continue
            if folders.setdefault(own.reference.partition(":")[0], own.folder) != own.folder:
                raise UsageError(
                    f"'{text}' is not allowed: another setting names a file of that name in "
                    "another folder; rename one"
                )
            section[key] = own.reference
        except UsageError as error:
            problems.append(source.problem(where, str(error)))
    return list(folders.values()), problems


def _names(value: Any, where: KeyPath) -> Iterator[tuple[dict[str, Any], str, KeyPath]]:
    """Mappings in the values, their key that names a file, and where it stands."""
    if not isinstance(value, dict) or "options" in where:
        return
    for key, inner in value.items():
        inside = SECTIONS.get(key, set()).intersection(where)
        if inside and isinstance(inner, str) and OWN_FILE.fullmatch(inner):
            yield value, key, (*where, key)
        yield from _names(inner, (*where, key))
