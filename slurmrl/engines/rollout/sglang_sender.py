"""New weights for an SGLang server that are sent to it, in place of files that it reads.

The versions from 0.5.21 on take them between ``/begin_weight_update`` and ``/end_weight_update``,
which convert what kernels keep in another form; 0.5.20 has no such routes, so servers whose weights
have another form are refused (`fitness.Receiver`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from slurmrl.config.servers import Address
from slurmrl.engines.rollout.base import WeightVersion
from slurmrl.engines.rollout.buckets import BUCKET_BYTES, Bucket, read_ahead
from slurmrl.engines.rollout.fitness import Receiver
from slurmrl.engines.rollout.http import Body
from slurmrl.errors import RefusedError, RunFailedError

T = TypeVar("T")


class Succeed(Protocol):
    """Posts a request to a server; raises SlurmrlError if that is not successful."""

    async def __call__(self, path: str, body: Body) -> object: ...


class SglangSender(ABC, Generic[T]):
    """Sends weights to one server, for as long as a connection to it lasts."""

    bucket_bytes = BUCKET_BYTES

    def __init__(self, address: Address, receiver: Receiver, succeed: Succeed) -> None:
        """``succeed`` asks the server at ``address``."""
        self._address, self._receiver, self._succeed = address, receiver, succeed

    async def send(self, version: WeightVersion, *, held: str) -> None:
        """Replace the weights of the paused, idle server, which says that it has those of ``held``,
        by ``version``. Raises RunFailedError, and UsageError if another attempt would be in vain;
        what the server holds is undefined then."""
        assert version.folder is not None, "checked by the dialect"
        try:
            await self._prepare(held)
            if self._receiver.sessions:
                await self._succeed("/begin_weight_update", {})
            reading = read_ahead(version.folder, self.bucket_bytes, self._pack)
            async with aclosing(reading) as buckets:
                async for bucket, packed in buckets:
                    body: dict[str, Any] = {"flush_cache": bucket.last}
                    if bucket.last:
                        body["weight_version"] = version.name
                    await self._send(bucket, packed, body)
            if self._receiver.sessions:
                await self._succeed("/end_weight_update", {})
        except RunFailedError:
            raise
        except RefusedError as error:
            if error.status != HTTPStatus.BAD_REQUEST:
                raise
            raise RunFailedError(str(error)) from error
        except (RuntimeError, OSError) as error:  # of torch, and of memory or files
            raise RunFailedError(f"{self._address.text}: {error}") from error

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
