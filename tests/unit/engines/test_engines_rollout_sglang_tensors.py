"""What is sent to an SGLang server in the bodies of requests."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slurmrl.config.servers import Address
from slurmrl.engines.rollout.base import WeightVersion
from slurmrl.engines.rollout.fitness import Receiver
from slurmrl.engines.rollout.http import Body
from slurmrl.engines.rollout.sglang_tensors import SglangTensors

TENSORS = {
    "a": torch.arange(400, dtype=torch.bfloat16).view(20, 20),
    "b": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "c": torch.arange(3000, dtype=torch.float32),
    "d": torch.tensor(0.5),
}
ALLOWED = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch.storage _load_from_bytes",
}
"""What the pickles name. SGLang admits these in all versions, and so does torch of all versions."""


def test_every_rank_gets_the_values_of_all_tensors_and_the_last_request_brings_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    asked: list[tuple[str, dict[str, Any]]] = []

    async def succeed(path: str, body: Body) -> object:
        asked.append((path, json.loads(body) if isinstance(body, bytes) else dict(body)))
        return {}

    monkeypatch.setattr(SglangTensors, "bucket_bytes", 2 * 1024)
    receiver = Receiver(ranks=2, sessions=True)
    sender = SglangTensors(Address("http://node:1"), receiver, succeed)

    async def work() -> None:
        await sender.send(WeightVersion(name="v", folder=tmp_path), held="of somebody")
        await sender.close()

    asyncio.run(work())
    update = ["/update_weights_from_tensor"] * 3
    begin, end = "/begin_weight_update", "/end_weight_update"
    assert [path for path, _ in asked] == [begin, *update, end]
    names = []
    for path, body in asked:
        if path not in update:
            continue
        first, second = body.pop("serialized_named_tensors")
        assert first == second
        content = base64.b64decode(first)
        assert set(global_names(content)) == ALLOWED
        named = pickle.loads(content)  # noqa: S301 - our own bytes
        for name, tensor in named:
            assert torch.equal(tensor, TENSORS[name])
            assert tensor.dtype == TENSORS[name].dtype
        names.append([name for name, _ in named])
        size = sum(TENSORS[name].nbytes for name, _ in named)
        assert len(content) < size + 1000 * len(named), "no tensor comes with what is beside it"
        last = "d" in names[-1]
        assert body == {"flush_cache": last, **({"weight_version": "v"} if last else {})}
    assert names == [["a", "b"], ["c"], ["d"]], "a bucket of half the size for each of two ranks"


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
