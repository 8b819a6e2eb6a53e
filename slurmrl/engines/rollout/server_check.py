"""The check of the weights of one server (see `weight_checks`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from slurmrl.engines.rollout.base import WeightVersion
from slurmrl.engines.rollout.weight_checks import Digest, Expected, Held, WeightChecks
from slurmrl.errors import UsageError


class ServerCheck:
    """The checks of one server, since it was connected to."""

    def __init__(
        self,
        checks: WeightChecks,
        where: str,
        digest: Digest | str,
        report: Callable[[], Awaitable[Sequence[Held]]],
        *,
        first_only: bool = False,
    ) -> None:
        """``digest``: or why that of the server is not known; ``report`` asks it for what it holds;
        ``first_only``: whether that takes too long to be done for each version."""
        self._checks, self._where, self._report = checks, where, report
        self._first_only = first_only
        self._digest: Digest | None = None
        self._replaced: Sequence[Held] = ()
        self._expecting: asyncio.Task[Expected] | None = None
        if isinstance(digest, str):
            self._give_up(digest)
        else:
            self._digest = digest

    async def before_load(self, version: WeightVersion) -> None:
        """To be called before the server replaces its weights by those of ``version``. What it is
        to hold then is computed while it reads them, if it is known which parameters it has."""
        first = self._checks.own and not self._checks.began(self._where)
        self._replaced = (await self._held() or ()) if first else ()
        self.close()
        known = self._replaced or self._checks.last_held(self._where)
        if self._digest is not None and known:
            expecting = self._checks.expect(version, known, self._digest)
            self._expecting = asyncio.create_task(expecting)
            self._expecting.add_done_callback(_forget)

    def close(self) -> None:
        """Nothing is loaded any more."""
        if self._expecting is not None:
            self._expecting.cancel()
            self._expecting = None

    async def after_load(self, version: WeightVersion) -> None:
        """Raises RunFailedError if the server does not hold the version that it has loaded."""
        held = await self._held()
        if held is None or self._digest is None:
            return
        await self._checks.check(self._where, version, held, self._digest, replaced=self._replaced)
        if self._first_only:
            self._digest = None

    async def _held(self) -> Sequence[Held] | None:
        if self._digest is None:
            return None
        try:
            return await self._report()
        except UsageError as error:  # a route that the server does not have, or a kind of weights
            if self._checks.began(self._where):
                raise
            self._give_up(error)
            return None

    def _give_up(self, reason: object) -> None:
        self._digest = None
        self._checks.tell(self._where, f"its weights are not checked: {reason}")


def _forget(expecting: asyncio.Task[Expected]) -> None:
    """An error of the files is one of `ServerCheck.after_load`, which reads what is missing."""
    if not expecting.cancelled():
        expecting.exception()
