"""New weights for an SGLang server that are sent to it, in place of files that it reads.

The versions from 0.5.21 on take them between ``/begin_weight_update`` and ``/end_weight_update``,
which convert what kernels keep in another form; 0.5.20 has no such routes, so servers whose weights
have another form are refused (`fitness.Receiver`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from slurmrl.config.servers import Address
from slurmrl.engines.rollout.base import WeightVersion
from slurmrl.engines.rollout.buckets import BUCKET_BYTES, Bucket, read_ahead
from slurmrl.engines.rollout.fitness import Receiver
from slurmrl.engines.rollout.http import Body
from slurmrl.engines.rollout.sending import in_part, one_attempt
from slurmrl.errors import RunFailedError

T = TypeVar("T")


class UpdatedServer(Protocol):
    """What is known of a server, and asked of it. Methods raise SlurmrlError."""

    async def succeed(self, path: str, body: Body) -> object:
        """Post a request, and return the answer if that says that it was successful."""
        ...

    async def version(self) -> str:
        """The weight version that it says it has."""
        ...


class SglangSender(ABC, Generic[T]):
    """Sends weights to one server, for as long as a connection to it lasts."""

    bucket_bytes = BUCKET_BYTES

    def __init__(self, address: Address, receiver: Receiver, server: UpdatedServer) -> None:
        """``server``: the one at ``address``."""
        self._address, self._receiver, self._server = address, receiver, server

    async def send(self, version: WeightVersion, *, held: str) -> None:
        """Replace the weights of the paused, idle server, which says that it has those of ``held``,
        by ``version``. Raises RunFailedError, and UsageError if another attempt would be in vain;
        what the server holds is undefined then."""
        assert version.folder is not None, "checked by the dialect"
        with one_attempt(self._address.text):
            await self._prepare(held)
            part = in_part()
            named = {"new_version": part, "abort_all_requests": False}
            await self._server.succeed("/update_weight_version", named)
            if self._receiver.sessions:
                await self._server.succeed("/begin_weight_update", {})
            reading = read_ahead(version.folder, self.bucket_bytes, self._pack)
            async with aclosing(reading) as buckets:
                async for bucket, packed in buckets:
                    body: dict[str, Any] = {"flush_cache": bucket.last}
                    if bucket.last:
                        await self._check(part)
                        body["weight_version"] = version.name
                    await self._send(bucket, packed, body)
            if self._receiver.sessions:
                await self._server.succeed("/end_weight_update", {})

    async def _check(self, part: str) -> None:
        """Raises RunFailedError if another start of the server, or another client, has taken a part
        of the version."""
        if (held := await self._server.version()) != part:
            raise RunFailedError(
                f"{self._address.text}: holds version {held} within an update: it was started "
                "again, or another run uses it"
            )

    @abstractmethod
    async def _prepare(self, held: str) -> None:
        """Before the first bucket of a version, while the server says that it has ``held``."""

    @abstractmethod
    def _pack(self, bucket: Bucket, content: Tensor) -> T:
        """The bytes of a bucket as they are sent. Called in another thread."""

    @abstractmethod
    async def _send(self, bucket: Bucket, packed: T, body: Mapping[str, object]) -> None:
        """Have the server load a bucket. ``body``: what its request has besides."""

    @abstractmethod
    async def close(self) -> None:
        """No more weights will be sent."""
