"""What a rank is doing at this moment, for people who ask why nothing goes on.

The thread that works says it, another one reads it and sends it along with the signs of life.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

IDLE = ""
"""The call of a rank that waits for the master's next message."""


class Doing(NamedTuple):
    call: str
    """A call of the dataflow graph, ``load``, ``save`` or ``start``; `IDLE` between two."""
    step: int | None
    since: float
    """Begin of the call, by the clock of `Activity`."""
    phase: str = ""
    part: int = 0
    """Micro-batch, from 1; 0 outside of them."""
    parts: int = 0


class Activity:
    """One rank's. What it holds is replaced as a whole, so a reader never sees half of a change."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._doing = Doing("start", None, clock())

    def begin(self, call: str, step: int | None = None) -> None:
        self._doing = Doing(call, step, self._clock())

    def end(self) -> None:
        self._doing = Doing(IDLE, None, self._clock())

    def phase(self, name: str, part: int = 0, parts: int = 0) -> None:
        """A part of the present call, perhaps micro-batch ``part`` of ``parts``."""
        self._doing = self._doing._replace(phase=name, part=part, parts=parts)

    def describe(self) -> dict[str, Any]:
        """As JSON, with the age ``since_s`` of the call in place of its begin."""
        told = self._doing._asdict()
        return {**told, "since_s": self._clock() - told.pop("since")}
