"""The result of one check."""

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
    """What to do about it; empty where nothing has to be done."""
    where: str = ""
    """The host that looked."""
    values: Mapping[str, float] = field(default_factory=dict)
    """What was measured, for programs; seconds end in ``_s``, bytes in ``_bytes``."""

    def at(self, host: str) -> Check:
        return replace(self, where=host)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Check:
        """Raises LookupError, ValueError or TypeError for what ``to_json`` did not make."""
        return Check(**{**values, "state": State(values["state"])})


def ok(name: str, measured: str, **values: float) -> Check:
    return Check(name, State.OK, measured, values=values)


def warning(name: str, measured: str, advice: str, **values: float) -> Check:
    return Check(name, State.WARNING, measured, advice, values=values)


def failed(name: str, measured: str, advice: str, **values: float) -> Check:
    return Check(name, State.FAILED, measured, advice, values=values)


def guarded(name: str, advice: str, look: Callable[[], Check | list[Check]]) -> list[Check]:
    """What a look found; what kept it from looking is a failed check of its name."""
    try:
        found = look()
    except (SlurmrlError, OSError) as error:
        return [failed(name, str(error), advice)]
    return found if isinstance(found, list) else [found]
