"""What a sink is: a copy of a trial's metrics in the form of another program.

A sink gets the steps of ``metrics.jsonl`` once they are committed, in order (`feeder`). A step that
is redone after a failure was not committed, so no sink has seen it. What remains is a kill while a
step is handed over: each sink finds out by itself, when it is opened, what it holds already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from slurmrl.config.load import load_resolved
from slurmrl.fsio import documents
from slurmrl.fsio.shapes import TEXT
from slurmrl.run.metrics import TIME
from slurmrl.run.paths import RunPaths

Lines = Sequence[Mapping[str, Any]]
"""Lines of ``metrics.jsonl`` of increasing steps."""


class Sink(Protocol):
    """Opened with the step up to which it certainly held everything; -1: none. One whose files or
    run are not there begins with the first step again."""

    @property
    def last(self) -> int:
        """The step after which it continues."""

    @property
    def kept(self) -> int:
        """The step up to which it holds everything even if this process or host is killed now."""

    def log(self, lines: Lines) -> None:
        """Take the steps after `last`."""

    def close(self) -> None:
        """Flush and close; `kept` is `last` then."""


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that can be plotted."""
    return {
        name: float(value)
        for name, value in values.items()
        if name not in ("step", TIME)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }


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
