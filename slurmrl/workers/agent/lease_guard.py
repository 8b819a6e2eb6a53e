"""The holder's side of a lease over time: beating it, and starting nothing when it may be lost."""

from __future__ import annotations

import time
from collections.abc import Callable

from slurmrl import log
from slurmrl.errors import EnvironmentFailure

logger = log.get(__name__)


class LeaseGuard:
    """Beats every ``beat_s``, and asks the history every ``check_s`` whether to go on.

    The host is fenced from a beat that failed on, or once the last good one began ``ttl_s`` ago
    (it was suspended, or hung): others may take it for dead then. While it is fenced it starts
    nothing new. A beat that gets through, and a look at the history after that, lift the fence.
    A directory that does not answer ends nothing.
    """

    def __init__(
        self,
        beat: Callable[[], None],
        check: Callable[[], None],
        *,
        beat_s: float,
        check_s: float,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``check`` raises what this host must end for; both raise EnvironmentFailure where the
        directory does not answer."""
        self._beat = beat
        self._check = check
        self._beat_s = beat_s
        self._check_s = check_s
        self._ttl_s = ttl_s
        self._clock = clock
        self._next_beat = self._next_check = clock()
        self._beaten_at: float | None = None
        """Begin of the last beat, if that one got through."""
        self._fenced = True

    def turn(self) -> None:
        """Do what is due. Raises what ``check`` raises, but no EnvironmentFailure."""
        self._fenced = self._fenced or not self._held()
        now = self._clock()
        if now >= self._next_beat:
            self._next_beat = now + self._beat_s
            if not self._try("beat the lease", self._beat):
                self._beaten_at, self._fenced = None, True
                return
            self._beaten_at = now
        if self._held() and (self._fenced or now >= self._next_check):
            self._next_check = now + self._check_s
            if self._try("read the history", self._check):
                self._fenced = False

    def may_start(self) -> bool:
        """Whether this host may start something new at this moment."""
        return not self._fenced and self._held()

    def _held(self) -> bool:
        return self._beaten_at is not None and self._clock() - self._beaten_at < self._ttl_s

    def _try(self, what: str, action: Callable[[], None]) -> bool:
        try:
            action()
        except EnvironmentFailure as error:
            logger.warning("cannot %s, trying on: %s", what, error)
            return False
        return True
