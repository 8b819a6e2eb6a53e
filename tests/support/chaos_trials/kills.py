"""The processes to kill and the times, drawn from a seed before the trial starts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

PHASES = {"step": 6, "commit": 2, "start": 2}
"""Relative frequency of each phase. ``start`` is the start after the previous kill."""


@dataclass(frozen=True)
class Plan:
    """A planned kill. The trial's observed progress and a fraction of the usual length of that
    phase define its time, so it is the same moment on machines of different speed.
    """

    number: int
    cause: str
    phase: str
    """Begin of the phase: the batch of ``step`` was posted (``step``), a checkpoint of ``step`` or
    later is being written (``commit``), or an incarnation has begun (``start``)."""
    step: int
    fraction: float
    """Delay before the kill, as a fraction of the phase's usual length."""
    choice: float
    """Position of the chosen process in the list of candidates, from 0 to 1."""

    @property
    def moment(self) -> str:
        where = "start" if self.phase == "start" else f"{self.phase} {self.step}"
        return f"{where} + {self.fraction:.0%}"


def draw(seed: int, kills: int, causes: Sequence[str], steps: int) -> list[Plan]:
    """Return ``kills`` plans in order. All causes occur equally often."""
    generator = random.Random(f"slurmrl chaos {seed}")
    order = list(itertools.islice(itertools.cycle(causes), kills))
    generator.shuffle(order)
    window = max(steps - 1, 1) / max(kills, 1)
    return [
        Plan(
            number,
            cause,
            generator.choices(list(PHASES), list(PHASES.values()))[0],
            1 + int((number - 1 + generator.random()) * window),
            round(generator.random(), 3),
            round(generator.random(), 3),
        )
        for number, cause in enumerate(order, start=1)
    ]
