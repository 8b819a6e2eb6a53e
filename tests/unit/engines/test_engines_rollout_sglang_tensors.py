"""What is sent to an SGLang server in the bodies of requests."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import pickletools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slurmrl.config.servers import Address
from slurmrl.engines.rollout import sglang_tensors
from slurmrl.engines.rollout.base import WeightVersion
from slurmrl.engines.rollout.fitness import Receiver
from slurmrl.engines.rollout.http import Body
from slurmrl.engines.rollout.sglang_tensors import SglangTensors
from slurmrl.errors import RunFailedError

TENSORS = {
    "a": torch.arange(400, dtype=torch.bfloat16).view(20, 20),
    "b": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "c": torch.arange(3000, dtype=torch.float32),
    "d": torch.tensor(0.5),
}
NAME = "/update_weight_version"
UPDATE = "/update_weights_from_tensor"
ALLOWED = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch.storage _load_from_bytes",
}
"""What the pickles name. SGLang admits these in all versions, and so does torch of all versions."""


class Server:
    """Keeps what it is asked. ``replaced_after`` so many buckets another process answers."""

    def __init__(self, replaced_after: int = 0) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.held, self.buckets, self.replaced_after = "of somebody", 0, replaced_after

    async def succeed(self, path: str, body: Body) -> object:
        whole = dict(body) if isinstance(body, Mapping) else json.loads(b"".join(body))
        self.asked.append((path, whole))
        self.held = whole.get("weight_version", whole.get("new_version", self.held))
        if path == UPDATE:
            self.buckets += 1
            if self.buckets == self.replaced_after:
                self.held = "default"
        return {}

    async def version(self) -> str:
        return self.held


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(SglangTensors, "bucket_bytes", 2 * 1024)
    monkeypatch.setattr(sglang_tensors, "ENCODED_BYTES", 300)
    return tmp_path


def sent(server: Server, folder: Path, *, sessions: bool) -> None:
    receiver = Receiver(ranks=2, sessions=sessions)
    sender = SglangTensors(Address("http://node:1"), receiver, server)

    async def work() -> None:
        await sender.send(WeightVersion(name="v", folder=folder), held=server.held)
        await sender.close()

    asyncio.run(work())


def test_every_rank_gets_the_values_of_all_tensors_and_the_last_request_brings_the_version(
    folder: Path,
) -> None:
    server = Server()
    sent(server, folder, sessions=True)
    begin, end = "/begin_weight_update", "/end_weight_update"
    assert [path for path, _ in server.asked] == [NAME, begin, UPDATE, UPDATE, UPDATE, end]
    names, versions = [], []
    for path, body in server.asked:
        if path != UPDATE:
            continue
        first, second = body["serialized_named_tensors"]
        assert first == second
        content = base64.b64decode(first, validate=True)
        assert set(global_names(content)) == ALLOWED
        named = pickle.loads(content)  # noqa: S301 - our own bytes
        for name, tensor in named:
            assert torch.equal(tensor, TENSORS[name])
            assert tensor.dtype == TENSORS[name].dtype
        names.append([name for name, _ in named])
        size = sum(TENSORS[name].nbytes for name, _ in named)
        assert len(content) < size + 1000 * len(named), "no tensor comes with what is beside it"
        versions.append(body.get("weight_version"))
        assert body["flush_cache"] == (versions[-1] == "v")
    assert names == [["a", "b"], ["c"], ["d"]], "a bucket of half the size for each of two ranks"
    assert versions == [None, None, "v"]
    assert server.asked[0][1]["new_version"].startswith("in part")


@pytest.mark.parametrize("after", [1, 2])
def test_a_server_that_was_started_again_within_an_update_does_not_have_the_version(
    folder: Path, after: int
) -> None:
    """0.5.20 would take the rest."""
    server = Server(replaced_after=after)
    with pytest.raises(RunFailedError, match="http://node:1: holds version default within"):
        sent(server, folder, sessions=False)
    assert [path for path, _ in server.asked] == [NAME, UPDATE, UPDATE]


def global_names(content: bytes) -> list[str]:
    """Of the objects that a pickle imports, as ``module name``."""
    found, texts = [], []
    for code, value, _ in pickletools.genops(content):
        if isinstance(value, str):
            texts.append(value)
        if code.name == "GLOBAL":
            found.append(str(value))
        elif code.name == "STACK_GLOBAL":
            found.append(" ".join(texts[-2:]))
    return found
