"""A schedule: a seed interleaves the actors, and one of them is killed at a chosen operation."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.chaos.stepping import WRITES, Actor, Process

MAX_STEPS = 20_000
STICKINESS = (0.0, 0.6, 0.95)
"""Probabilities that the same actor continues: 0 alternates actors; near 1, others pause for
long."""

Event = dict[str, Any]
Check = Callable[[Path, list[Event]], None]


class ViolationError(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Scenario:
    """A tested protocol. Actor 0 is killed, and ``successor`` starts in its place."""

    name: str
    setup: Callable[[Path], None]
    actors: tuple[Actor, ...]
    check: Check
    successor: Actor | None = None


@dataclass
class Outcome:
    events: list[Event] = field(default_factory=list)
    killed_at: str | None = None
    """The operation as ``<number>:<operation>``; None if the victim ended earlier."""
    victim_operations: int = 0


class Runner:
    """Runs schedules of a scenario with processes that are reused until they are killed."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._parts = {str(number): actor for number, actor in enumerate(scenario.actors)}
        if scenario.successor is not None:
            self._parts["successor"] = scenario.successor
        self._processes = [Process(self._parts) for _ in self._parts]

    def close(self) -> None:
        for process in self._processes:
            process.kill()

    def run(self, folder: Path, seed: int, kill_at: int | None) -> Outcome:
        """Run and check a schedule. The victim is killed just before operation ``kill_at // 2``, or
        for odd numbers just after it, before any other actor moves. Raises ViolationError.
        """
        self.scenario.setup(folder)
        outcome = Outcome()
        for number, process in enumerate(self._processes[: len(self.scenario.actors)]):
            process.begin(str(number), folder, number, quiet=number > 0)
        self._interleave(folder, random.Random(f"{self.scenario.name} {seed}"), kill_at, outcome)
        crashes = [event for event in outcome.events if event.get("event") == "crash"]
        if crashes:
            raise ViolationError(f"an actor crashed: {crashes[0]['error']}", outcome)
        try:
            self.scenario.check(folder, outcome.events)
        except ViolationError as error:
            raise ViolationError(str(error), outcome) from error
        return outcome

    def _interleave(
        self, folder: Path, chance: random.Random, kill_at: int | None, outcome: Outcome
    ) -> None:
        victim, note = self._processes[0], outcome.events.append
        stickiness = chance.choice(STICKINESS)
        torn = chance.random() * 0.4
        moving = victim
        point, after = divmod(-2 if kill_at is None else kill_at, 2)
        for _ in range(MAX_STEPS):
            alive = [process for process in self._processes if process.operation is not None]
            if not alive:
                return
            if moving not in alive or chance.random() >= stickiness:
                moving = chance.choice(alive)
            due = moving is victim and outcome.killed_at is None and victim.count == point
            at = f"{victim.count}:{victim.operation}"
            if not due or after:
                half = moving.operation in WRITES and chance.random() < torn
                moving.go(note, half=half)
            if moving is victim:
                outcome.victim_operations = victim.count
            if due and victim.operation is not None:
                victim.kill()
                outcome.killed_at = at
                note({"actor": 0, "event": "killed", "at": at})
                self._succeed(folder)
        raise ViolationError(f"not over after {MAX_STEPS} operations: somebody waits for ever")

    def _succeed(self, folder: Path) -> None:
        if self.scenario.successor is not None:
            number = len(self.scenario.actors)
            self._processes[-1].begin("successor", folder, number, quiet=True)
