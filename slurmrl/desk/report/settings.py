"""The settings of a trial by dotted key, and where trials differ. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from pydantic import BaseModel

from slurmrl.config.problems import keys, names_sections, section_of
from slurmrl.config.schema import Config
from slurmrl.plan.algorithms import ALGORITHMS

Flat: TypeAlias = Mapping[str, Any]
"""Settings by dotted key."""

OWN: Final = ("experiment", "trial", "root")
"""Settings that always differ between trials."""
NO_DEFAULT: Final = object()


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``{"actor.optimizer.lr": 0.001, …}``. Lists and empty sections are values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{key}.")
        else:
            found[key] = value
    return found


def differences(settings: Sequence[Flat]) -> dict[str, list[Any]]:
    """Return the values by trial of each dotted key in which they differ.

    A value is None if a trial lacks the key.

    A section that a trial lacks is one key, with the settings of the others in it: settings other
    than the defaults, by the remainder of their dotted keys. A single setting that a trial lacks
    does not count if the others leave it at its default. The name of a trial never counts.
    """
    found: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for one in settings for key in one):
        if key in OWN:
            continue
        section = _lacking(key, settings)
        if section is not None:
            set_in = [_set_in(section, one) for one in settings]
            having = next(one for one in settings if _has(section, one))
            if any(set_in) or not isinstance(_default(section, having), BaseModel):
                found[section] = set_in
            continue
        values = [one.get(key) for one in settings]
        lacking = any(key not in one for one in settings)
        if lacking and all(one[key] == _default(key, one) for one in settings if key in one):
            continue
        if any(value != values[0] for value in values):
            found[key] = values
    return found


def _lacking(key: str, settings: Sequence[Flat]) -> str | None:
    """The uppermost section around a setting that some trial lacks."""
    parts = key.split(".")
    for length in range(1, len(parts)):
        section = ".".join(parts[:length])
        if not all(_has(section, one) for one in settings):
            return section
    return None


def _has(section: str, settings: Flat) -> bool:
    return any(key.startswith(f"{section}.") for key in settings)


def _set_in(section: str, settings: Flat) -> dict[str, Any] | None:
    """What a trial sets in a section; None without the section."""
    if not _has(section, settings):
        return None
    prefix = f"{section}."
    return {
        key.removeprefix(prefix): value
        for key, value in settings.items()
        if key.startswith(prefix) and value != _default(key, settings)
    }


def _default(key: str, settings: Flat) -> Any:
    """Return the default of a setting as it is written to a file.

    Return `NO_DEFAULT` if the setting has none or is not known.
    """
    name, *rest = key.split(".")
    if name != "algorithm" or not rest:
        return _default_in(Config, [name, *rest])
    algorithm = settings.get("algorithm.name")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        return NO_DEFAULT
    return _default_in(ALGORITHMS.load(algorithm), rest)


def _default_in(schema: type[BaseModel], parts: Sequence[str]) -> Any:
    field = dict(keys(schema)).get(parts[0])
    if field is None:
        return NO_DEFAULT
    below = section_of(field.annotation)
    rest = parts[2:] if names_sections(field.annotation) else parts[1:]
    if rest and below is not None:
        return _default_in(below, rest)
    if len(parts) > 1 or field.is_required():
        return NO_DEFAULT
    default = field.get_default(call_default_factory=True)
    return list(default) if isinstance(default, tuple) else default
