"""Sleeping between looks at something that has not changed: short at first, longer when idle."""

from __future__ import annotations

import random
import time
from collections.abc import Callable


class Backoff:
    """Pauses that grow from ``first_s`` to ``last_s``, by ``growth`` each time.

    While a pause is short of ``last_s`` it is about ``1 - 1 / growth`` of the time waited so far:
    a third by default.

    Each pause is shortened by up to a quarter at random, so that a thousand waiters that started
    together do not ask a metadata server together. The generator is its own: a training process
    seeds the global ones.
    """

    JITTER = 0.25

    def __init__(
        self,
        first_s: float = 0.001,
        last_s: float = 0.05,
        *,
        growth: float = 1.5,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.first_s = first_s
        self.last_s = last_s
        self._growth = growth
        self._sleep = sleep
        self._random = random.Random()
        self._pause_s = first_s

    def next_s(self) -> float:
        """The next pause in seconds, for a caller that waits by itself."""
        pause_s = self._pause_s
        self._pause_s = min(pause_s * self._growth, self.last_s)
        return pause_s * (1 - self.JITTER * self._random.random())

    def sleep(self) -> None:
        self._sleep(self.next_s())

    def reset(self) -> None:
        """Something happened: start again with short pauses."""
        self._pause_s = self.first_s
