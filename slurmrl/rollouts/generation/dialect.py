"""The contract of the kinds of servers: how one of them is asked for completions and updated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from slurmrl.errors import RunFailedError
from slurmrl.models.generate import GenerationOptions
from slurmrl.rollouts.generation.base import Completion, WeightVersion


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One completion that a server is to make."""

    name: str
    """Unique among what the server works on."""
    prompt: tuple[int, ...]
    seed: int
    """0 to 2**63 - 1; its random stream."""
    options: GenerationOptions
    priority: int
    """Lower begins first."""


class Dialect(ABC):
    """The routes, bodies and replies of one kind of server, spoken to through one client.

    Methods raise RunFailedError where the server cannot be reached, fails, or does not answer in
    time, and UsageError where it refuses the request as such.
    """

    where: str
    """The server's address, for messages."""

    @abstractmethod
    async def connect(self) -> int:
        """Check that the server is of this kind, in a version and with the flags that the other
        methods need. Returns the most tokens that a prompt and its completion may have together."""

    @abstractmethod
    async def draw(self, draw: Draw) -> Completion:
        """The completion, once it has ended. No time limit: a server may be busy or paused."""

    @abstractmethod
    async def abort(self, name: str) -> None:
        """Have the draw of this name return what it has as ``aborted``; no-op if the server does
        not know it (yet)."""

    @abstractmethod
    async def pause(self) -> None:
        """Draw no token from the return on; draws keep waiting for their answers. No time limit."""

    @abstractmethod
    async def resume(self) -> None:
        """Undo ``pause``."""

    @abstractmethod
    async def version(self) -> str:
        """The name of the weight version that the server reports."""

    async def check_version(self, name: str) -> None:
        """Return if the server holds the version of this name."""
        held = await self.version()
        if held != name:
            raise RunFailedError(f"{self.where}: holds version {held} instead of {name}")

    @abstractmethod
    async def load(self, version: WeightVersion) -> None:
        """Replace the weights of the paused server by those of ``version``, forget what was cached
        of others (unless requests in flight are to keep it), and check that the server reports the
        version. No time limit: how long it may take depends on the weights and on where they
        are."""

    @abstractmethod
    async def sleep(self) -> None:
        """Free the device memory of the idle server. Its weights and caches are lost."""

    @abstractmethod
    async def wake(self) -> None:
        """Undo `sleep`; the weights are undefined until `load`."""

    @abstractmethod
    async def health(self) -> None:
        """Return if the part of the server that computes answers."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections. Draws fail with RunFailedError."""
