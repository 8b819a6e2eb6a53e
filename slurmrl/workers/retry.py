"""Retries of actions on a shared directory that may not answer for a while."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from slurmrl import log
from slurmrl.backoff import Backoff
from slurmrl.errors import EnvironmentFailure, OwnershipError

logger = log.get(__name__)
T = TypeVar("T")

RETRY_S = (0.5, 15.0)
"""First and longest pause between two attempts."""


def retry(
    what: str,
    action: Callable[[], T],
    pause: Callable[[float], None] = time.sleep,
    *,
    timeout_s: float = math.inf,
) -> T:
    """Run ``action`` until the shared directory answers, with ``pause`` between attempts. ``what``
    names the action in log messages.

    Raises OwnershipError at once, EnvironmentFailure after ``timeout_s``.
    """
    backoff = Backoff(*RETRY_S)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return action()
        except OwnershipError:
            raise
        except EnvironmentFailure as error:
            if time.monotonic() >= deadline:
                raise
            logger.warning("cannot %s, will retry: %s", what, error)
        pause(backoff.next_s())
