"""Weights for a vLLM server over a process group, which slurmrl's receiver in the processes of the
server joins (`vllm_receiver`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from slurmrl.config.servers import Address
from slurmrl.engines.rollout.base import WeightVersion
from slurmrl.engines.rollout.buckets import BUCKET_BYTES, buckets_of, read_ahead
from slurmrl.engines.rollout.kept_group import KeptGroup
from slurmrl.engines.rollout.sending import one_attempt
from slurmrl.engines.rollout.server_group import Meeting, ServerGroup, both
from slurmrl.engines.rollout.vllm_plugin import CLOSED, OPEN, STATE
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.models.hf import open_tensors


class Post(Protocol):
    """Posts a request to a server, without a time limit."""

    async def __call__(self, path: str, body: Mapping[str, object] | None = None) -> object: ...


class VllmBroadcast:
    """Sends weights to one server, for as long as a connection to it lasts. Each rank
    keeps a bucket in its host's memory until the layers that it belongs to are whole."""

    bucket_bytes = BUCKET_BYTES

    def __init__(self, address: Address, ranks: int, post: Post) -> None:
        """``ranks``: of the server at ``address``, which ``post`` asks."""
        self._address, self._ranks, self._post = address, ranks, post
        self._kept = KeptGroup(address.text, meet=self._meet)
        self._updates = 0

    async def send(self, version: WeightVersion, *, held: str) -> None:
        """Replace the weights of the paused server, which says that it has those of ``held``, by
        ``version``. Raises RunFailedError, and UsageError if another attempt would be in vain; what
        the server holds is undefined then."""
        assert version.folder is not None, "checked by the dialect"
        with one_attempt(self._address.text):
            group = await self._kept.begin(held)
            await self._post("/start_weight_update")
            await self._update(group, version.folder)
            await self._post("/finish_weight_update")
        self._kept.end(version.name)

    async def _update(self, group: ServerGroup, folder: Path) -> None:
        self._updates += 1
        topic = f"update {self._updates}"

        async def send() -> None:
            reading = read_ahead(folder, self.bucket_bytes, lambda _, content: content)
            async with aclosing(reading) as buckets:
                async for _, content in buckets:
                    await group.send(content)

        update = {"topic": topic, "buckets": self._described(folder)}
        await both(self._post("/update_weights", {"update_info": update}), send())
        self._check(await group.notes(topic))

    def _check(self, problems: Sequence[str]) -> None:
        """Raises RunFailedError with the first problem of a rank."""
        for rank, problem in enumerate(problems):
            if problem:
                raise RunFailedError(
                    f"{self._address.text}: rank {rank} did not take the weights: {problem}"
                )

    def _described(self, folder: Path) -> list[dict[str, Any]]:
        with open_tensors(folder) as files:
            return [asdict(bucket) for bucket in buckets_of(files, self.bucket_bytes)]

    async def _meet(self) -> ServerGroup:
        async def invite(meeting: Meeting) -> object:
            body = {"init_info": asdict(meeting)}
            return await self._post("/init_weight_transfer_engine", body)

        group = await ServerGroup.meet(invite, self._address, ranks=self._ranks)
        states = await group.notes(STATE)
        if not set(states) <= {OPEN, CLOSED}:
            raise UsageError(
                f"{self._address.text}: its receiver of weights is of another version of slurmrl: "
                "install that of the trainers in the server's environment"
            )
        if OPEN in states:  # a client was lost within an update
            await self._post("/finish_weight_update")
        return group

    async def close(self) -> None:
        """No more weights will be sent."""
        await self._kept.close()
