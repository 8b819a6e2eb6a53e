"""The process group with one server, for as long as a connection to it lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from slurmrl.engines.rollout.server_group import ServerGroup
from slurmrl.errors import RunFailedError, SlurmrlError

LEAVE_S = 5.0
"""How long a server may take to leave the group."""


class KeptGroup:
    """Formed with the first version that is sent, and used for all others."""

    def __init__(
        self,
        where: str,
        *,
        meet: Callable[[], Awaitable[ServerGroup]],
        leave: Callable[[str], Awaitable[object]] | None = None,
    ) -> None:
        """``meet`` forms the group with the server ``where``; ``leave`` has the server leave it if
        it still has the version that was sent last."""
        self._where, self._meet, self._leave = where, meet, leave
        self._group: ServerGroup | None = None
        self._sent: str | None = None
        """The version that was sent last; None while one is sent in part."""

    async def begin(self, held: str) -> ServerGroup:
        """The group, to send a version to the server, which says that it has ``held``. Raises
        RunFailedError if that is not what was sent last: its group is perhaps another one, too."""
        if self._group is not None and held != self._sent:
            raise RunFailedError(
                f"{self._where}: holds version {held} instead of {self._sent}: it was "
                "started again, or another run uses it"
            )
        self._sent = None
        if self._group is None:
            self._group = await self._meet()
        return self._group

    def end(self, version: str) -> None:
        """All of a version was sent."""
        self._sent = version

    async def close(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is None:
            return
        try:
            if self._sent is not None and self._leave is not None:
                with suppress(SlurmrlError, TimeoutError):
                    async with asyncio.timeout(LEAVE_S):
                        await self._leave(self._sent)
        finally:
            group.close()
