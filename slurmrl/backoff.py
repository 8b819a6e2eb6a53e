"""Waiting and retrying: the pauses between polls and between attempts.

`Backoff` spaces polls, `Interval` limits the frequency of an action, `attempts` repeats an
operation a fixed number of times, and `retry` repeats it until the shared directory answers.
"""

from __future__ import annotations

import errno
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from slurmrl import log
from slurmrl.errors import EnvironmentFailure, OwnershipError, UnreadableInputError
from slurmrl.fsio.calls import NO_FILE, cause

logger = log.get(__name__)
T = TypeVar("T")

UNCLEAR_PAUSES_S = (0.005, 0.02, 0.1, 0.5, 1.0)
"""Pauses in seconds between attempts at an operation whose outcome is unclear."""
HIDDEN_PAUSES_S = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Pauses in seconds between checks for a file that must exist but is not visible yet. The pauses
sum to 64 s, because an NFS client may report a file as missing for a minute."""
OUTAGE_S = (0.5, 15.0)
"""First and longest pause in seconds while the shared directory does not answer."""
READ_S = 60.0
"""Seconds that a starting process waits for files that it must read."""
ABSENT_S = 10.0
"""Seconds of retries for an input that certainly does not exist."""
REPLACED = (*NO_FILE, errno.ENOTDIR)
"""Error numbers of a path that names the wrong kind of file. Only a user can correct the path."""


class Backoff:
    """Pauses that grow from ``first_s`` to ``last_s`` by a factor of ``growth``.

    Until pauses reach ``last_s``, each takes about ``1 - 1 / growth`` of the time waited so far
    (default: a third).

    Each pause is shortened at random by up to a quarter. A thousand processes that start waiting
    together therefore do not poll a metadata server in step. The random generator is private,
    because training processes seed the global generators.
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
        """Return the next pause in seconds, for a caller that does not call `sleep`."""
        pause_s = self._pause_s
        self._pause_s = min(pause_s * self._growth, self.last_s)
        return pause_s * (1 - self.JITTER * self._random.random())

    def sleep(self) -> None:
        self._sleep(self.next_s())

    def reset(self) -> None:
        """Restart with the shortest pause: after an event, another event may follow soon."""
        self._pause_s = self.first_s


class Interval:
    """Allow an action after ``after_s`` seconds, and then once per ``interval_s`` seconds."""

    def __init__(
        self,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        after_s: float = 0.0,
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._next = clock() + after_s

    def due(self) -> bool:
        """Return whether the interval has passed. If it has, start the next interval."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + self._interval_s
        return True


def attempts(
    pauses_s: Sequence[float], sleep: Callable[[float], None] = time.sleep
) -> Iterator[bool]:
    """Yield once per attempt: True for the last attempt, else False. Pause between attempts."""
    for pause_s in pauses_s:
        yield False
        sleep(pause_s)
    yield True


def retry(
    what: str,
    action: Callable[[], T],
    pause: Callable[[float], None] = time.sleep,
    *,
    timeout_s: float = math.inf,
) -> T:
    """Repeat ``action`` until the directory answers.

    The directory has answered if ``action`` raises neither EnvironmentFailure nor
    UnreadableInputError. ``pause`` waits between attempts; ``what`` names the action in log
    messages.

    Raises OwnershipError at once, and the other two errors after ``timeout_s``. Retry for at most
    `ABSENT_S` if an input certainly does not exist; for `READ_S` after `REPLACED`.
    """
    backoff = Backoff(*OUTAGE_S)
    began = since = time.monotonic()
    while True:
        try:
            return action()
        except OwnershipError:
            raise
        except (EnvironmentFailure, UnreadableInputError) as error:
            now, limit_s = time.monotonic(), _limit_s(error)
            since = since if math.isfinite(limit_s) else now
            if now - began >= timeout_s or now - since >= limit_s:
                raise
            logger.warning("cannot %s, will retry: %s", what, error)
        pause(backoff.next_s())


def _limit_s(error: EnvironmentFailure | UnreadableInputError) -> float:
    """Return the time limit, in seconds, of retries after an error that may be permanent."""
    if isinstance(error, UnreadableInputError):
        return ABSENT_S if error.absent else math.inf
    return READ_S if cause(error) in REPLACED else math.inf
