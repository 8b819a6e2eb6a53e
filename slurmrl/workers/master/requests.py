"""User requests to a running incarnation through the name store: stacks of its ranks.

Requests of an incarnation are numbered without a gap, each made by an exclusive add, so looking
for the next one is a single failed open per look, and none is lost or answered twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from slurmrl import log
from slurmrl.backoff import Interval
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.name_resolve.base import NameStore
from slurmrl.watch import published
from slurmrl.workers.messages import CollectStacks, Order

logger = log.get(__name__)


class StackRequests:
    """Forwards requests to the agents, which answer with files."""

    def __init__(
        self,
        names: NameStore,
        incarnation: int,
        post: Callable[[Order], object],
        *,
        look_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = names
        self._incarnation = incarnation
        self._post = post
        self._looks = Interval(look_s, clock, after_s=look_s)
        self._number = 1

    def look(self) -> None:
        """When due, look for the next request and forward it."""
        if not self._looks.due():
            return
        try:
            request = published.stacks_request(self._names, self._incarnation, self._number)
        except CorruptFileError as error:
            logger.warning("request skipped: %s", error)
            self._number += 1
            return
        except EnvironmentFailure as error:
            logger.warning("cannot look for requests, will retry: %s", error)
            return
        if request is None:
            return
        number, self._number = self._number, self._number + 1
        logger.info("stacks requested (request %d)", number)
        self._post(CollectStacks(number=number, ranks=request.ranks))
