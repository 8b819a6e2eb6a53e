"""The configuration that sinks show beside the curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slurmrl.config.load import load_resolved
from slurmrl.fsio import documents
from slurmrl.fsio.shapes import TEXT
from slurmrl.paths import RunPaths


def settings(paths: RunPaths) -> dict[str, Any]:
    """The resolved configuration without variables of the environment, which may be secrets."""
    found: dict[str, Any] = load_resolved(paths.config).model_dump(mode="json")
    del found["cluster"]["env"]
    return found


def flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings that have a value, with their dotted names."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def uuid(paths: RunPaths) -> str:
    """What tells this trial from others of the same name."""
    found: str = documents.read(paths.identity, {"uuid": TEXT}, ("uuid",))["uuid"]
    return found
