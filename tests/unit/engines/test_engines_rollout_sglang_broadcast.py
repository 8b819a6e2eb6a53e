"""What is sent to an SGLang server over a process group, and what a failure is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from slurmrl.config.servers import Address
from slurmrl.engines.rollout.base import WeightVersion
from slurmrl.engines.rollout.fitness import Receiver
from slurmrl.engines.rollout.server_group import ServerGroup
from slurmrl.engines.rollout.sglang_broadcast import SglangBroadcast
from slurmrl.errors import RefusedError, RunFailedError, UnreadableInputError, UsageError

TENSORS = {
    "a": torch.arange(3, dtype=torch.bfloat16),
    "b": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "c": torch.arange(2, dtype=torch.float32),
    "d": torch.arange(100, dtype=torch.float32).view(10, 10),
    "e": torch.arange(4, dtype=torch.float32),
}


class Server:
    """Receives buckets as a server does; ``fails`` raises at a route."""

    def __init__(self, fails: Mapping[str, Exception] | None = None) -> None:
        self.routes: list[str] = []
        self.bodies: list[Mapping[str, Any]] = []
        self.contents: list[Tensor] = []
        self.fails = fails or {}
        self.closed = False
        self.version_now = "of somebody"

    async def succeed(self, path: str, body: Mapping[str, object]) -> object:
        self.routes.append(path)
        if path in self.fails:
            raise self.fails[path]
        self.version_now = str(
            body.get("weight_version", body.get("new_version", self.version_now))
        )
        if path == "/update_weights_from_distributed":
            self.bodies.append(body)
        return {}

    async def version(self) -> str:
        return self.version_now

    async def broadcast(self, tensor: Tensor, answer: Any) -> object:
        self.contents.append(tensor.clone())
        return await answer

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def speaker(
    server: Server, monkeypatch: pytest.MonkeyPatch, *, sessions: bool = False
) -> SglangBroadcast:
    async def meet(invite: Any, address: Address, *, ranks: int) -> Server:
        assert ranks == 2
        return server

    monkeypatch.setattr(ServerGroup, "meet", meet)
    monkeypatch.setattr(SglangBroadcast, "bucket_bytes", 64)
    receiver = Receiver(ranks=2, sessions=sessions)
    return SglangBroadcast(Address("http://node:1"), receiver, server)


@pytest.mark.parametrize("sessions", [False, True])
def test_buckets_have_one_dtype_and_the_last_one_brings_the_version(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sessions: bool
) -> None:
    """Receivers look at the bytes as tensors, which must be aligned. One that is larger than a
    bucket comes alone."""
    server = Server()
    made = speaker(server, monkeypatch, sessions=sessions)

    async def work() -> None:
        await made.send(WeightVersion(name="v", folder=folder), held="of somebody")
        await made.close()

    asyncio.run(work())
    assert [body["names"] for body in server.bodies] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert [body["flush_cache"] for body in server.bodies] == [False, False, False, True]
    assert [body.get("weight_version") for body in server.bodies] == [None, None, None, "v"]
    for body, content in zip(server.bodies, server.contents, strict=True):
        rest = content
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            size = TENSORS[name].nbytes
            part = rest[:size].view(getattr(torch, dtype)).view(shape)
            assert torch.equal(part, TENSORS[name])
            rest = rest[size:]
        assert len(rest) == 0
    inside = ["/update_weights_from_distributed"] * 4
    leave = ["/destroy_weights_update_group"]
    begin, end = ["/begin_weight_update"], ["/end_weight_update"]
    name = ["/update_weight_version"]
    middle = [*begin, *inside, *end] if sessions else inside
    routes = [*leave, *name, *middle, *leave]
    assert server.routes == routes
    assert server.closed


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RefusedError("refused", 400), "^refused"),
        (torch.OutOfMemoryError("memory"), "^http://node:1: memory"),
        (OSError("files"), "^http://node:1: files"),
        (UnreadableInputError("a shard", False), "^http://node:1: a shard"),
        (MemoryError("none"), "^http://node:1: none"),
        (RefusedError("no such route yet", 404), "^no such route yet"),
    ],
)
def test_whatever_fails_costs_the_server_and_not_the_trial(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    """A group in an undefined state is left without a word to the server."""
    server = Server({"/update_weights_from_distributed": error})
    made = speaker(server, monkeypatch)

    async def work() -> None:
        with pytest.raises(RunFailedError, match=message):
            await made.send(WeightVersion(name="v", folder=folder), held="w")
        await made.close()

    asyncio.run(work())
    assert server.routes.count("/destroy_weights_update_group") == 1
    assert server.closed


def test_what_no_attempt_can_change_ends_the_trial(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key for another server, or a proxy that admits no bodies of this size."""
    server = Server({"/update_weights_from_distributed": RefusedError("too large", 413)})
    made = speaker(server, monkeypatch)
    with pytest.raises(UsageError, match="too large"):
        asyncio.run(made.send(WeightVersion(name="v", folder=folder), held="w"))


def test_a_server_that_holds_another_version_than_was_sent_gets_no_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started again, or another client has taken its group: one that asks 0.5.20 for a group
    that it does not have ends it."""
    server = Server()
    made = speaker(server, monkeypatch)

    async def work() -> None:
        await made.send(WeightVersion(name="v", folder=folder), held="w")
        server.routes.clear()
        with pytest.raises(RunFailedError, match="holds version default instead of v"):
            await made.send(WeightVersion(name="w", folder=folder), held="default")

    asyncio.run(work())
    assert server.routes == []
