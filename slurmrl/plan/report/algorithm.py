"""The algorithm's settings in force, each with its source."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from pydantic import BaseModel

from slurmrl.plan.settings import Settings

FILE, PRESET, DEFAULT = "configuration", "preset", "default"
WIDTH: Final = 100
MOST_DEFAULTS: Final = 6
"""Defaults that are listed; of more, only their number is shown."""


def in_force(settings: Settings) -> dict[str, Any]:
    """``name``, and for each source the settings that come from it, by dotted key: those that the
    configuration sets, those of the algorithm's preset, and other defaults. ``rollout.n`` is among
    them where the algorithm chooses it."""
    algorithm, values = settings.algorithm, settings.source.values
    written = set(_flat(values.get("algorithm") or {}))
    preset = set(_flat(algorithm.preset))
    by_source: dict[str, dict[str, Any]] = {FILE: {}, PRESET: {}, DEFAULT: {}}
    for key, value in _flat(cast(BaseModel, algorithm).model_dump(mode="json")).items():
        source = FILE if key in written else PRESET if key in preset else DEFAULT
        by_source[source][key] = value
    if algorithm.completions > 1:
        chosen = "n" in (values.get("rollout") or {})
        by_source[FILE if chosen else PRESET]["rollout.n"] = settings.config.rollout.n
    name = by_source[FILE].pop("name", algorithm.name)
    by_source[DEFAULT].pop("name", None)
    return {"name": name, **by_source}


def lines(settings: Mapping[str, Any]) -> Iterator[str]:
    """One wrapped paragraph for each source."""
    titles = {FILE: "set", PRESET: f"preset {settings['name']}", DEFAULT: "default"}
    for source, title in titles.items():
        count = len(settings[source])
        if source == DEFAULT and count > MOST_DEFAULTS:
            yield f"default: {count} other settings (--json shows them)"
        elif count:
            shown = (f"{key} {json.dumps(value)}" for key, value in settings[source].items())
            yield from textwrap.wrap(
                f"{title}: {', '.join(shown)}",
                WIDTH,
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
