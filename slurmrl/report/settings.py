"""The settings of a trial by dotted key, and where trials differ. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

OWN: Final = ("experiment", "trial", "root")
"""Settings that always differ between trials."""


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


def differences(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values by trial of each dotted key in which they differ; None where a trial lacks
    the key. The name of a trial does not count."""
    keys = dict.fromkeys(key for one in settings for key in one)
    values = {key: [one.get(key) for one in settings] for key in keys if key not in OWN}
    return {key: found for key, found in values.items() if any(one != found[0] for one in found)}
