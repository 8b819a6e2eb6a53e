"""How long a step waits for samples that it could do without."""

from __future__ import annotations

from collections.abc import Callable


class StepWait:
    """In all no longer than the step before took."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step = -1
        self._began = clock()
        self._most_s = 0.0
        self._since: float | None = None

    def begin(self, step: int) -> None:
        """Call it whenever a step asks for samples."""
        if step != self._step:
            now = self._clock()
            self._step, self._began, self._most_s = step, now, now - self._began
            self._since = None

    def lasts(self) -> bool:
        """Whether to go on waiting. The first call of a step begins to count."""
        now = self._clock()
        if self._since is None:
            self._since = now
        return now - self._since < self._most_s
