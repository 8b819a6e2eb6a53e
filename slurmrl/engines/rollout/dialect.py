"""The contract of the kinds of servers: how one of them is asked for completions and updated."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from pathlib import Path

from slurmrl.engines.rollout.base import Completion, WeightVersion
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.models.generate import GenerationOptions
from slurmrl.plan.estimates.shape import ModelShape
from slurmrl.plan.estimates.shape import read as read_shape


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


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model whose weights a server is given."""

    architecture: str
    """As in ``config.json``: ``Qwen2ForCausalLM``."""
    vocabulary: int
    shape: ModelShape | None = None
    """None: of any sizes."""
    text: bool = False
    """Whether requests need a tokenizer on the server."""

    def check_folder(self, where: str, folder: object) -> None:
        """Compare the sizes with those in the server's ``folder`` of the model, if there is such a
        folder here. Raises UsageError if one differs: of a model with fewer layers, a server would
        load the weights without a word."""
        if self.shape is None:
            return
        try:
            values = json.loads((Path(str(folder)) / "config.json").read_bytes())
        except (OSError, ValueError):
            return  # a name of the hub, or a path of the server's host
        found = read_shape(values) if isinstance(values, dict) else None
        for size in fields(ModelShape):
            own, its = getattr(self.shape, size.name), getattr(found, size.name, None)
            if found is not None and own != its and size.name != "positions":
                raise UsageError(
                    f"{where}: the server's model {folder} has {size.name} {its}, the weights have "
                    f"{own}"
                )

    async def check_vocabulary(self, where: str, knows: Callable[[int], Awaitable[bool]]) -> None:
        """``knows``: whether the server's model has a token id. Raises UsageError if its vocabulary
        has another size."""
        if not await knows(self.vocabulary - 1) or await knows(self.vocabulary):
            raise UsageError(
                f"{where}: the server's model does not have a vocabulary of {self.vocabulary} "
                "token ids, as the weights have"
            )


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
        """Draw no token from the return on; draws keep waiting for their answers."""

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
        of others, and check that the server reports the version."""

    @abstractmethod
    async def health(self) -> None:
        """Return if the part of the server that computes answers."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections. Draws fail with RunFailedError."""
