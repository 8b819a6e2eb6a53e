"""Weights for an SGLang server over a process group."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from torch import Tensor

from slurmrl.config.servers import Address
from slurmrl.engines.rollout.base import WeightVersion
from slurmrl.engines.rollout.buckets import Bucket
from slurmrl.engines.rollout.fitness import Receiver
from slurmrl.engines.rollout.kept_group import KeptGroup
from slurmrl.engines.rollout.server_group import BACKEND, NAME, Meeting, ServerGroup
from slurmrl.engines.rollout.sglang_sender import SglangSender, UpdatedServer
from slurmrl.errors import UsageError


class SglangBroadcast(SglangSender[Tensor]):
    """A bucket is in the memory of each GPU of the server twice while it is loaded."""

    def __init__(self, address: Address, receiver: Receiver, server: UpdatedServer) -> None:
        super().__init__(address, receiver, server)
        self._kept = KeptGroup(address.text, meet=self._meet, leave=self._leave)
        self._group: ServerGroup | None = None
        """That of the version that is being sent."""

    async def send(self, version: WeightVersion, *, held: str) -> None:
        await super().send(version, held=held)
        self._kept.end(version.name)

    async def _prepare(self, held: str) -> None:
        self._group = await self._kept.begin(held)

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
            return await self._server.succeed("/init_weights_update_group", body)

        return await ServerGroup.meet(invite, self._address, ranks=self._receiver.ranks)

    async def _leave(self, sent: str) -> None:
        if await self._server.version() == sent:  # else the group may be another client's
            await self._disband()

    async def _disband(self) -> None:
        """Have the server leave its group, if it has one."""
        with suppress(UsageError):
            await self._server.succeed("/destroy_weights_update_group", {"group_name": NAME})

    def _pack(self, bucket: Bucket, content: Tensor) -> Tensor:
        return content

    async def _send(self, bucket: Bucket, packed: Tensor, body: Mapping[str, object]) -> None:
        assert self._group is not None, "it was formed before the first bucket"
        described = {
            "names": bucket.names,
            "dtypes": [bucket.dtype] * len(bucket.names),
            "shapes": bucket.shapes,
            "group_name": NAME,
            "load_format": "flattened_bucket",
        }
        answer = self._server.succeed("/update_weights_from_distributed", {**described, **body})
        await self._group.broadcast(packed, answer)

    async def close(self) -> None:
        await self._kept.close()
