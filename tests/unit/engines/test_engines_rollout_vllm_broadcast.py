"""What is sent to a vLLM server over a process group, and what a failure is."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from slurmrl.config.servers import Address
from slurmrl.engines.rollout.base import WeightVersion
from slurmrl.engines.rollout.fitness import vllm_ranks
from slurmrl.engines.rollout.server_group import Meeting, ServerGroup
from slurmrl.engines.rollout.vllm_broadcast import VllmBroadcast
from slurmrl.engines.rollout.vllm_plugin import CLOSED, OPEN, STATE
from slurmrl.errors import RefusedError, RunFailedError, UsageError

TENSORS = {
    "a": torch.arange(3, dtype=torch.bfloat16),
    "b": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "c": torch.arange(20, dtype=torch.float32),
}
INIT = "/init_weight_transfer_engine"
START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"


class Server:
    """Two ranks that receive. ``fails`` raises at a route, ``noted`` is what the ranks note."""

    def __init__(
        self,
        fails: Mapping[str, Exception] | None = None,
        noted: Mapping[str, list[str]] | None = None,
    ) -> None:
        self.fails, self.noted = fails or {}, noted or {}
        self.routes: list[str] = []
        self.updates: list[Any] = []
        self.contents: list[Tensor] = []
        self.closed = False

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> object:
        self.routes.append(path)
        if path in self.fails:
            raise self.fails[path]
        if path == UPDATE:
            assert body is not None
            self.updates.append(body["update_info"])
        return {}

    async def send(self, tensor: Tensor) -> None:
        self.contents.append(tensor.clone())

    async def notes(self, topic: str) -> list[str]:
        return self.noted.get(topic, [CLOSED, CLOSED] if topic == STATE else ["", ""])

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def version(tmp_path: Path) -> WeightVersion:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    return WeightVersion(name="v", folder=tmp_path)


def sender(server: Server, monkeypatch: pytest.MonkeyPatch) -> VllmBroadcast:
    async def meet(invite: Any, address: Address, *, ranks: int) -> Server:
        await invite(Meeting(host="node", port=1, ranks=1 + ranks))
        return server

    monkeypatch.setattr(ServerGroup, "meet", meet)
    monkeypatch.setattr(VllmBroadcast, "bucket_bytes", 64)
    return VllmBroadcast(Address("http://node:1"), 2, server.post)


def test_one_update_brings_all_buckets_in_the_order_that_it_says(
    version: WeightVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    made = sender(server, monkeypatch)

    async def work() -> None:
        await made.send(version, held="of somebody")
        await made.send(version, held="v")
        await made.close()

    asyncio.run(work())
    assert server.routes == [INIT, *(2 * [START, UPDATE, FINISH])]
    assert server.closed
    first, second = server.updates
    assert (first["buckets"], first["topic"] != second["topic"]) == (second["buckets"], True)
    assert [bucket["names"] for bucket in first["buckets"]] == [["a", "b"], ["c"]]
    for bucket, content in zip(first["buckets"], server.contents, strict=False):
        rest = content.view(getattr(torch, bucket["dtype"]))
        for name, shape in zip(bucket["names"], bucket["shapes"], strict=True):
            size = TENSORS[name].numel()
            assert torch.equal(rest[:size].view(shape), TENSORS[name])
            rest = rest[size:]
        assert len(rest) == 0
    assert len(server.contents) == 4


@pytest.mark.parametrize(
    ("server", "kind", "message"),
    [
        (Server(fails={INIT: RunFailedError("no memory")}), RunFailedError, "no memory"),
        (
            Server(fails={UPDATE: torch.OutOfMemoryError("all")}),
            RunFailedError,
            "http://node:1: all",
        ),
        (Server(fails={FINISH: OSError("files")}), RunFailedError, "http://node:1: files"),
        (
            Server(noted={"update 1": ["", "no such tensor"]}),
            RunFailedError,
            "http://node:1: rank 1 did not take the weights: no such tensor",
        ),
        (Server(fails={START: RefusedError("unknown", 404)}), RunFailedError, "unknown"),
        (Server(fails={START: RefusedError("no key", 401)}), UsageError, "no key"),
    ],
)
def test_whatever_may_not_fail_again_costs_the_server_and_not_the_trial(
    version: WeightVersion,
    monkeypatch: pytest.MonkeyPatch,
    server: Server,
    kind: type[Exception],
    message: str,
) -> None:
    """A group in an undefined state is left without a word to the server."""
    made = sender(server, monkeypatch)

    async def work() -> None:
        with pytest.raises(kind, match=f"^{message}"):
            await made.send(version, held="w")
        await made.close()

    asyncio.run(work())
    assert server.closed == (INIT not in server.fails)


def test_an_update_whose_client_was_lost_is_ended_before_the_next(
    version: WeightVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM refuses the end of one that has not begun, so it is asked only where there is one."""
    server = Server(noted={STATE: [OPEN, CLOSED]})
    asyncio.run(sender(server, monkeypatch).send(version, held="w"))
    assert server.routes == [INIT, FINISH, START, UPDATE, FINISH]


def test_a_receiver_of_another_version_of_slurmrl_ends_the_trial(
    version: WeightVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take other fields, or understand them otherwise."""
    server = Server(noted={STATE: [CLOSED, "2"]})
    with pytest.raises(UsageError, match="of another version of slurmrl"):
        asyncio.run(sender(server, monkeypatch).send(version, held="w"))
    assert server.routes == [INIT]


def test_a_server_that_holds_another_version_than_was_sent_gets_no_request(
    version: WeightVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    made = sender(server, monkeypatch)

    async def work() -> None:
        await made.send(version, held="w")
        server.routes.clear()
        with pytest.raises(RunFailedError, match="holds version default instead of v"):
            await made.send(version, held="default")

    asyncio.run(work())
    assert server.routes == []


def settings(quantization: str | None = None, **parallel: int) -> dict[str, Any]:
    return {
        "vllm_config": {
            "model_config": {"quantization": quantization},
            "weight_transfer_config": {"backend": "slurmrl"},
            "parallel_config": {"tensor_parallel_size": 2, "data_parallel_size": 1, **parallel},
        }
    }


def test_servers_that_were_not_tried_are_refused() -> None:
    """The others have as many ranks as share the model."""
    assert vllm_ranks("server", settings(), "broadcast") == 2
    for size in ("pipeline", "data", "prefill_context"):
        with pytest.raises(UsageError, match=f"not possible with .*--{size.replace('_', '-')}-pa"):
            vllm_ranks("server", settings(**{f"{size}_parallel_size": 2}), "broadcast")
    with pytest.raises(UsageError, match=r"quantized weights \(fp8\)"):
        vllm_ranks("server", settings("fp8"), "broadcast")
    other = {"vllm_config": {"weight_transfer_config": {"backend": "nccl"}}}
    with pytest.raises(
        UsageError, match=r"--weight-transfer-config '\{\"backend\": \"slurmrl\"\}'"
    ):
        vllm_ranks("server", other, "broadcast")


IMPORTS = """
import sys
from slurmrl.engines.rollout.vllm_plugin import register
register()
assert "torch" not in sys.modules
import slurmrl.engines.rollout.server_group
found = {name.partition(".")[0] for name in sys.modules}
print(*found & {"aiohttp", "pydantic", "ruamel", "safetensors", "transformers", "xxhash"})
"""


def test_what_runs_in_vllms_environment_needs_torch_alone() -> None:
    """slurmrl is installed there without what it requires. Where vLLM has no such backends, its
    start is not disturbed."""
    words = [sys.executable, "-W", "ignore", "-c", IMPORTS]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
