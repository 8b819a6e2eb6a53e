"""Tests of the interpretation of vLLM's answers, and of unusable servers."""

from __future__ import annotations

import asyncio
import copy
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.schema.rollout import Address
from slurmrl.errors import RunFailedError, SlurmrlError, UsageError
from slurmrl.models.architecture import ModelConfig
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import WeightVersion
from slurmrl.rollouts.generation.fitness import ServedModel
from slurmrl.rollouts.generation.http import HttpClient
from slurmrl.rollouts.generation.server_kinds import weights_config
from slurmrl.rollouts.generation.vllm import (
    FIRST,
    VllmDialect,
    VllmServer,
    digest_of,
    read_checksums,
    read_reply,
)
from slurmrl.rollouts.generation.weight_checks import Held, TensorPart
from tests.support.servers import start_command
from tests.support.trials import ARCHITECTURE

REPLY: dict[str, Any] = {
    "request_id": "generate-tokens-r",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "token_ids": [7, 8, 9],
            "weight_versions": [
                {"version": "1.1", "start": 0, "end": 2},
                {"version": "2.1", "start": 2, "end": 3},
            ],
            "logprobs": {
                "content": [{"token_id": 6 + k, "logprob": -0.5 * k, "rank": 1} for k in (1, 2, 3)]
            },
        }
    ],
}
SERVER: dict[str, Any] = {
    "GET /version": {"version": "0.32.0"},
    "GET /server_info": {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}},
    "GET /v1/models": {"data": [{"root": "/none", "max_model_len": 256}]},
    "GET /weight_info": {"weight_version": "2.1"},
    "POST /inference/v1/generate": REPLY,
    "POST /resume": {"status": "resumed"},
    "POST /pause": {"status": "paused"},
    "POST /collective_rpc": {"results": [None]},
    "POST /reset_prefix_cache": {"success": True},
    "POST /update_weight_version": {"success": True},
}
VOCABULARY = 50
EXPERTS = {"model_type": "mixtral", "num_local_experts": 4}
TIED = {"tie_word_embeddings": True}
MODEL = ServedModel(architecture="Qwen2ForCausalLM", vocabulary=VOCABULARY)


class ScriptedClient(HttpClient):
    """A client that answers from a table; other requests get status 404."""

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__(Address("unix:/none"))
        self.answers = answers
        self.asked: list[str] = []

    async def get(self, path: str, *, timeout_s: float) -> object:
        return self._answer(f"GET {path}")

    async def post(self, path: str, body: Any = None, *, timeout_s: float | None) -> object:
        bias = (body or {}).get("sampling_params", {}).get("logit_bias", {})
        if any(int(token) >= VOCABULARY for token in bias):  # what 0.32.0 says
            raise UsageError("token_id(s) [50] in logit_bias contain out-of-vocab token ids.")
        return self._answer(f"POST {path}")

    def _answer(self, what: str) -> object:
        self.asked.append(what)
        if what.partition("?")[0] not in self.answers:
            raise UsageError(f"{what}: HTTP status 404")
        return self.answers[what.partition("?")[0]]


def changed(path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    reply = copy.deepcopy(REPLY)
    at: Any = reply["choices"][0]
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return reply


def test_server_starts_after_another_was_killed(tmp_path: Path) -> None:
    """The socket of the killed server still exists, and vLLM would not bind it."""
    (tmp_path / "server.sock").touch()
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ ! -e "$6" ] || exit 7\necho "$@"\n')
    python.chmod(0o700)
    started = start_command(VllmServer, str(python), ARCHITECTURE, tmp_path)
    found = subprocess.run(started, capture_output=True, text=True, check=True).stdout
    assert "--uds" in found
    assert found.startswith("-m vllm.entrypoints.openai.api_server --model ")
    assert not (tmp_path / "server.sock").exists()


def test_reply_becomes_a_completion_with_a_version_per_token() -> None:
    assert read_reply("server", REPLY) == Completion(
        tokens=(7, 8, 9),
        logprobs=(-0.5, -1.0, -1.5),
        versions=("1.1", "1.1", "2.1"),
        finish="stop",
    )
    assert read_reply("server", changed(("finish_reason",), "abort")).finish == "aborted"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("finish_reason",), "error"),
        (("token_ids",), [7, 8]),
        (("token_ids",), [7, 8, 1]),
        (("weight_versions",), None),
        (("weight_versions", 1, "end"), 4),
        (("logprobs",), None),
        (("logprobs", "content", 0, "logprob"), None),
    ],
)
def test_incomplete_reply_is_not_a_completion(path: tuple[str | int, ...], value: object) -> None:
    with pytest.raises(RunFailedError, match="server"):
        read_reply("server", changed(path, value))


def test_paused_server_is_resumed_before_it_is_checked() -> None:
    """A client that was killed during an update leaves the server paused."""
    client = ScriptedClient(SERVER)
    assert asyncio.run(VllmDialect(client, model=MODEL).connect()) == 256
    assert client.asked.index("POST /resume") < client.asked.index("POST /inference/v1/generate")


@pytest.mark.parametrize(
    ("answers", "kind", "message"),
    [
        ({"GET /version": {"version": "0.31.2"}}, UsageError, "0.31.2 is too old; at least 0.32"),
        (
            {"GET /server_info": {"vllm_config": {"model_config": {"logprobs_mode": "raw"}}}},
            UsageError,
            "--logprobs-mode is raw.*--enable-scale-out --logprobs-mode processed_logprobs",
        ),
        ({"GET /server_info": None}, UsageError, "VLLM_SERVER_DEV_MODE=1"),
        ({"POST /inference/v1/generate": None}, UsageError, "404"),
        ({"GET /v1/models": {"data": []}}, RunFailedError, "lists no model"),
    ],
)
def test_unusable_server_is_rejected_with_the_missing_feature(
    answers: dict[str, Any], kind: type[SlurmrlError], message: str
) -> None:
    table = {name: value for name, value in {**SERVER, **answers}.items() if value is not None}
    with pytest.raises(kind, match=message):
        asyncio.run(VllmDialect(ScriptedClient(table), model=MODEL).connect())


@pytest.mark.parametrize(("device", "refused"), [("cpu", True), ("cuda", False)])
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {**TIED, "num_attention_heads": 1, "num_key_value_heads": 1},
            "tie_word_embeddings",
        ),
        (EXPERTS, "of a model with experts"),
        ({"hidden_size": 48}, "heads of at least 32 dimensions, and the actor's have 24"),
    ],
)
def test_cpu_server_is_rejected_if_it_does_not_update_weights(
    more: dict[str, Any], message: str, device: str, refused: bool
) -> None:
    """The server would sample with the old output layer, misread new experts, or lack a kernel."""
    config = ModelConfig.from_hf({**ARCHITECTURE, "vocab_size": VOCABULARY, **more})
    model = ServedModel.of(weights_config(config, "float32"), text=False, experts=False)
    settings = {**SERVER["GET /server_info"]["vllm_config"], "device_config": {"device": device}}
    table = {**SERVER, "GET /server_info": {"vllm_config": settings}}
    connecting = VllmDialect(ScriptedClient(table), model=model).connect()
    with pytest.raises(UsageError, match=message) if refused else nullcontext():
        asyncio.run(connecting)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"GET /weight_info": {"weight_version": "1.1"}}, "holds version 1.1 instead of 2.1"),
        ({"POST /reset_prefix_cache": {"success": False}}, "did not empty its prefix cache"),
    ],
)
def test_server_update_without_effect_fails(
    answers: dict[str, Any], message: str, tmp_path: Path
) -> None:
    async def load(answers: dict[str, Any]) -> None:
        dialect = VllmDialect(ScriptedClient(answers), model=MODEL)
        await dialect.connect()
        await dialect.load(WeightVersion(name="2.1", folder=tmp_path))

    with pytest.raises(RunFailedError, match=message):
        asyncio.run(load({**SERVER, **answers}))
    asyncio.run(load(SERVER))


def test_checksums_are_read_per_rank_without_reordered_matrices() -> None:
    """The rank is part of the name. Matrices that kernels may have reordered are left out."""
    reply = {
        "checksums": {
            f"dp0:pp0:pcp0:tp{rank}:model.{name}": f"{rank}"
            for rank in (0, 1)
            for name in ("norm.weight", "layers.0.mlp.down_proj.weight")
        }
    }
    assert read_checksums("server", reply) == [
        Held(TensorPart(rank, 2), {"model.norm.weight": f"{rank}"}) for rank in (0, 1)
    ]
    with pytest.raises(RunFailedError, match=r"model\.x does not have the form of vLLM's names"):
        read_checksums("server", {"checksums": {"model.x": "0"}})


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_servers_that_quantize_are_not_checked(quantization: str | None) -> None:
    digest = digest_of({"vllm_config": {"model_config": {"quantization": quantization}}})
    assert isinstance(digest, str) == (quantization is not None)


def test_records_that_vllm_does_not_provide_are_rejected() -> None:
    for options in (
        replace(FIRST.options, greedy=False, top_k=2, masks=True),
        replace(FIRST.options, experts=True),
    ):
        draw = replace(FIRST, options=options)
        with pytest.raises(UsageError, match="use native or sglang"):
            asyncio.run(VllmDialect(ScriptedClient({}), model=MODEL).sample(draw))
