"""New weights for an SGLang server over a process group, in place of files that it reads.

The versions from 0.5.21 on take them between ``/begin_weight_update`` and ``/end_weight_update``,
which convert what kernels keep in another form; 0.5.20 has no such routes, so servers whose weights
have another form are refused (`fitness.Joins`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from slurmrl.checkpoint.tensors import DTYPES
from slurmrl.config.servers import Address
from slurmrl.engines.rollout.base import WeightVersion
from slurmrl.engines.rollout.fitness import Joins
from slurmrl.engines.rollout.server_group import BACKEND, NAME, Meeting, ServerGroup
from slurmrl.errors import RunFailedError, SlurmrlError, UsageError
from slurmrl.models.headers import Header
from slurmrl.models.hf import Tensors, open_tensors

BUCKET_BYTES = 32 * 2**20
"""Of the tensors that one broadcast sends; a larger tensor is sent alone. Twice as much is in
memory here, for each server, and on each GPU of the server."""
LEAVE_S = 5.0
"""How long a server may take to leave the group."""


class Succeed(Protocol):
    """Posts a request to a server; raises SlurmrlError if that is not successful."""

    async def __call__(self, path: str, body: Mapping[str, object]) -> object: ...


class SglangBroadcast:
    """Sends weights to one server, for as long as a connection to it lasts."""

    def __init__(self, address: Address, joins: Joins, succeed: Succeed) -> None:
        """``succeed`` asks the server at ``address``."""
        self._address, self._joins, self._succeed = address, joins, succeed
        self._group: ServerGroup | None = None
        self._sent: str | None = None
        """The version that was sent last; None while one is sent in part."""

    async def send(self, version: WeightVersion, *, held: str) -> None:
        """Replace the weights of the paused, idle server, which says that it has those of ``held``,
        by ``version``. Raises RunFailedError; what the server holds is undefined then."""
        assert version.folder is not None, "checked by the dialect"
        if self._group is not None and held != self._sent:  # its group is perhaps another one, too
            raise RunFailedError(
                f"{self._address.text}: holds version {held} instead of {self._sent}: it was "
                "started again, or another run uses it"
            )
        self._sent = None
        try:
            if self._group is None:
                self._group = await self._meet()
            if self._joins.sessions:
                await self._succeed("/begin_weight_update", {})
            await self._send_all(self._group, version.folder, version.name)
            if self._joins.sessions:
                await self._succeed("/end_weight_update", {})
        except (UsageError, RuntimeError, OSError) as error:  # another group may succeed
            raise RunFailedError(f"{self._address.text}: {error}") from error
        self._sent = version.name

    async def _meet(self) -> ServerGroup:
        await self._disband()  # one of an earlier client

        async def invite(meeting: Meeting) -> object:
            body = {
                "master_address": meeting.host,
                "master_port": meeting.port,
                "rank_offset": 1,
                "world_size": meeting.ranks,
                "group_name": NAME,
                "backend": BACKEND,
            }
            return await self._succeed("/init_weights_update_group", body)

        return await ServerGroup.meet(invite, self._address, ranks=self._joins.ranks)

    async def _disband(self) -> None:
        """Have the server leave its group, if it has one."""
        with suppress(UsageError):
            await self._succeed("/destroy_weights_update_group", {"group_name": NAME})

    async def _send_all(self, group: ServerGroup, folder: Path, name: str) -> None:
        """The next bucket is read while one is sent."""
        with open_tensors(folder) as files:
            buckets = list(buckets_of(files, BUCKET_BYTES))
            reading = asyncio.ensure_future(asyncio.to_thread(buckets[0].read, files))
            try:
                for number, bucket in enumerate(buckets, 1):
                    content = await reading
                    body = {**bucket.body(), "flush_cache": False}
                    if number < len(buckets):
                        following = asyncio.to_thread(buckets[number].read, files)
                        reading = asyncio.ensure_future(following)
                    else:
                        body = {**bucket.body(), "flush_cache": True, "weight_version": name}
                    answer = self._succeed("/update_weights_from_distributed", body)
                    await group.broadcast(content, answer)
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    async def close(self) -> None:
        """Leave the group; so does a server that answers."""
        group, self._group = self._group, None
        if group is None:
            return
        try:
            if self._sent is not None:
                with suppress(SlurmrlError, TimeoutError):
                    async with asyncio.timeout(LEAVE_S):
                        await self._disband()
        finally:
            group.close()


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Tensors that are sent together, as bytes, one after the other."""

    names: list[str]
    headers: list[Header]

    def body(self) -> dict[str, object]:
        """Of the request with which the server receives it."""
        return {
            "names": self.names,
            "dtypes": [DTYPES[header.dtype] for header in self.headers],
            "shapes": [list(header.shape) for header in self.headers],
            "group_name": NAME,
            "load_format": "flattened_bucket",
        }

    def read(self, files: Tensors) -> Tensor:
        """uint8: the bytes of all of them. One alone stays where the file is mapped."""
        parts = [files.read(name).contiguous().view(-1).view(torch.uint8) for name in self.names]
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def bytes_of(header: Header) -> int:
    """Of a tensor."""
    return math.prod(header.shape) * int(getattr(torch, DTYPES[header.dtype]).itemsize)


def buckets_of(files: Tensors, limit: int) -> Iterator[Bucket]:
    """All tensors of a folder in buckets of one dtype (its elements must be aligned) and of at most
    ``limit`` bytes, or of one tensor."""
    names: list[str] = []
    headers: list[Header] = []
    size = 0
    for name in files.names():
        header = files.header(name)
        if names and (size + bytes_of(header) > limit or header.dtype != headers[0].dtype):
            yield Bucket(names=names, headers=headers)
            names, headers, size = [], [], 0
        names.append(name)
        headers.append(header)
        size += bytes_of(header)
    yield Bucket(names=names, headers=headers)
