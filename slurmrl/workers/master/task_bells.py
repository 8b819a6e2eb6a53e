"""The doorbells of rollout tasks as the master uses them (see `channel.bell`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from slurmrl.channel.bell import Bell, BellAddress
from slurmrl.workers.master.task_attempts import RolloutAttempt
from slurmrl.workers.poll_intervals import RESULTS_PER_S

AT_ONCE = 15
"""Logs that are read at once, which takes the master a tenth of a second or less."""


class TaskBells:
    """Hears which attempts have recorded results, and rings at theirs. Without a ``bell`` nothing
    is ever heard."""

    def __init__(self, bell: Bell | None = None) -> None:
        self._bell = bell

    @property
    def address(self) -> BellAddress | None:
        return None if self._bell is None else self._bell.address

    @property
    def descriptors(self) -> Collection[int]:
        """What is readable when there is something to `hear`."""
        return () if self._bell is None else (self._bell.fileno(),)

    def hear(self, attempts: Iterable[RolloutAttempt], now: float) -> None:
        """Have the logs of those be read that have rung: of a few at once, of a thousand at the
        pace at which logs of results are read."""
        if self._bell is None:
            return
        rings = self._bell.hear()
        if not rings.sources and not rings.overflowed:
            return
        rung = [
            one
            for one in attempts
            if one.bell is not None and (rings.overflowed or one.bell.source in rings.sources)
        ]
        for number, attempt in enumerate(rung):
            attempt.rang(now + max(0, number - AT_ONCE) / RESULTS_PER_S)

    def ring(self, attempts: Iterable[RolloutAttempt]) -> None:
        """Say that there are requests or weights."""
        if self._bell is not None:
            self._bell.ring([one.bell for one in attempts if one.bell is not None])
