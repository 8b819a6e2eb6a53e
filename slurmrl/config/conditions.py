"""Conditions in a configuration: ``stop_when`` and the ``every_*`` frequencies."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from slurmrl.errors import UsageError

_CONDITION: Final = re.compile(r"\s*([A-Za-z_][\w./@-]*)\s*(>=|<=)\s*(\S+)\s*")


@dataclass(frozen=True)
class StopWhen:
    """``METRIC >= NUMBER`` or ``METRIC <= NUMBER`` over the metrics of a step."""

    metric: str
    operator: str
    number: float

    @staticmethod
    def parse(text: str) -> StopWhen:
        """Raises UsageError (a ValueError) with the expected form."""
        match = _CONDITION.fullmatch(text)
        number = _number(match[3]) if match else None
        if match is None or number is None:
            raise UsageError(
                "expected METRIC >= NUMBER or METRIC <= NUMBER, for example eval/reward >= 0.4"
            )
        return StopWhen(match[1], match[2], number)

    def met(self, metrics: Mapping[str, Any]) -> bool:
        """Whether the condition holds; false for a step without the metric."""
        value = metrics.get(self.metric)
        if not isinstance(value, int | float):
            return False
        return value >= self.number if self.operator == ">=" else value <= self.number

    def __str__(self) -> str:
        return f"{self.metric} {self.operator} {self.number:g}"


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


class Frequency:
    """Decide when an action is due: after a number of steps, seconds or epochs, whichever is first.

    All counters restart when it is due. ``state`` is committed with the run, so that a resumed run
    continues with the same steps and epochs; seconds count from the start of the process.
    """

    def __init__(
        self,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        every_epochs: int | None = None,
        *,
        now_s: float = 0.0,
    ) -> None:
        self.every_steps = every_steps
        self.every_seconds = every_seconds
        self.every_epochs = every_epochs
        self._step = 0
        self._epoch = 0
        self._time_s = now_s

    def check(self, step: int, epochs: int, now_s: float) -> bool:
        """True when due.

        ``step`` and ``epochs`` are numbers of completed ones; ``now_s`` is any monotonic clock in
        seconds.
        """
        due = (
            (self.every_steps is not None and step - self._step >= self.every_steps)
            or (self.every_epochs is not None and epochs - self._epoch >= self.every_epochs)
            or (self.every_seconds is not None and now_s - self._time_s >= self.every_seconds)
        )
        if due:
            self._step, self._epoch, self._time_s = step, epochs, now_s
        return due

    def state(self) -> dict[str, int]:
        return {"step": self._step, "epoch": self._epoch}

    def restore(self, state: Mapping[str, int]) -> None:
        self._step, self._epoch = state["step"], state["epoch"]
