"""Renewal of a host's lease, and a fence that stops new work while the lease may have expired."""

from __future__ import annotations

import time
from collections.abc import Callable

from slurmrl import log
from slurmrl.errors import EnvironmentFailure

logger = log.get(__name__)


class LeaseGuard:
    """Renews the lease every ``beat_s`` and reads the history every ``check_s``.

    The host is fenced when a renewal fails, or when the last successful one began ``ttl_s`` ago
    (the process was suspended or hung): others may take it for dead then. A fenced host starts
    nothing new. A successful renewal, followed by a successful read of the history, lifts the
    fence. A directory that does not answer ends nothing.
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
        """``beat`` renews the lease. ``check`` raises if this host must end. Both raise
        EnvironmentFailure while the directory does not answer."""
        self._beat = beat
        self._check = check
        self._beat_s = beat_s
        self._check_s = check_s
        self._ttl_s = ttl_s
        self._clock = clock
        self._next_beat = self._next_check = clock()
        self._beaten_at: float | None = None
        """When the last renewal began; None if it failed."""
        self._fenced = True

    def turn(self) -> None:
        """Renew and check when due. Raises what ``check`` raises, except EnvironmentFailure."""
        self._fenced = self._fenced or not self._held()
        now = self._clock()
        if now >= self._next_beat:
            self._next_beat = now + self._beat_s
            if not self._try("renew the lease", self._beat):
                self._beaten_at, self._fenced = None, True
                return
            self._beaten_at = now
        if self._held() and (self._fenced or now >= self._next_check):
            self._next_check = now + self._check_s
            if self._try("read the history", self._check):
                self._fenced = False

    def may_start(self) -> bool:
        """Return whether this host may start something new now."""
        return not self._fenced and self._held()

    def _held(self) -> bool:
        return self._beaten_at is not None and self._clock() - self._beaten_at < self._ttl_s

    def _try(self, what: str, action: Callable[[], None]) -> bool:
        try:
            action()
        except EnvironmentFailure as error:
            logger.warning("cannot %s, will retry: %s", what, error)
            return False
        return True
