"""Checks whether this cluster can run trials, on the login node and inside a short job.

A check measures something and gives advice. To add a check, write a function that returns a
`Check`, and call it in `examine` (login node) or in `probe.check_host` (host of the job).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from slurmrl.errors import SlurmrlError


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    name: str
    state: State
    measured: str
    advice: str = ""
    """Next step for the user; may be empty."""
    where: str = ""
    """The host on which the check ran."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Measurements for programs; seconds end in ``_s``, bytes in ``_bytes``."""

    def at(self, host: str) -> Check:
        return replace(self, where=host)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Check:
        """Parse plain values. Raises LookupError, ValueError or TypeError for invalid values."""
        return Check(**{**values, "state": State(values["state"])})


def ok(name: str, measured: str, **values: float) -> Check:
    return Check(name, State.OK, measured, values=values)


def warning(name: str, measured: str, advice: str, **values: float) -> Check:
    return Check(name, State.WARNING, measured, advice, values=values)


def failed(name: str, measured: str, advice: str, **values: float) -> Check:
    return Check(name, State.FAILED, measured, advice, values=values)


def guarded(name: str, advice: str, measure: Callable[[], Check | list[Check]]) -> list[Check]:
    """Return the checks of ``measure``; if it raises an error, a failed check called ``name``."""
    try:
        result = measure()
    except (SlurmrlError, OSError) as error:
        return [failed(name, str(error), advice)]
    return result if isinstance(result, list) else [result]
