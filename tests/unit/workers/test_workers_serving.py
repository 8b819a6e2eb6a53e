"""The servers that workers make from the configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from slurmrl.config.schema import Rollout
from slurmrl.config.schema.rollout import Address
from slurmrl.models.architecture import ModelConfig
from slurmrl.plan.settings import Settings
from slurmrl.rollouts.generation.http import HttpClient
from slurmrl.rollouts.generation.sglang import SglangDialect, SglangServer
from slurmrl.rollouts.generation.vllm import VllmDialect, VllmServer
from slurmrl.workers.rollout.task_setup import native
from slurmrl.workers.serving import own_server
from tests.unit.models.conftest import BASE, ODD, random_decoder


def settings_of(prompt: int | None = None, **rollout: Any) -> Settings:
    config = SimpleNamespace(
        rollout=Rollout(python="/server/bin/python", **rollout),
        actor=SimpleNamespace(
            tokenizer="/model",
            architecture=None,
            path=None,
            max_tokens_per_microbatch=64,
            implementation="builtin",
        ),
        dataset=SimpleNamespace(kind="prompt", max_prompt_tokens=prompt),
        evaluations={},
        rollout_evaluates=False,
    )
    return cast(Settings, SimpleNamespace(config=config))


@pytest.mark.parametrize(
    ("rollout", "needed"),
    [({}, False), ({"min_new_tokens": 2}, True), ({"stop_strings": ["</answer>"]}, True)],
)
def test_servers_get_the_tokenizer_if_requests_need_text(
    rollout: dict[str, Any], needed: bool
) -> None:
    serving = own_server(settings_of(**rollout), Path("/log"), memory_bytes=None)
    assert serving.tokenizer == (Path("/model") if needed else None)
    assert serving.text == needed


@pytest.mark.parametrize("replays", [False, True])
def test_servers_record_experts_if_they_are_replayed(replays: bool) -> None:
    settings = settings_of(replay_experts=replays)
    assert own_server(settings, Path("/log"), memory_bytes=None).experts == replays


@pytest.mark.parametrize(("prompt", "context"), [(100, 130), (None, 0)])
def test_servers_must_accept_the_longest_sequence_if_it_is_bounded(
    prompt: int | None, context: int
) -> None:
    settings = settings_of(prompt, max_new_tokens=30)
    assert own_server(settings, Path("/log"), memory_bytes=None).context == context


@pytest.mark.parametrize(
    ("tasks", "stale"), [(None, False), ({}, False), ({"stale_cache": True}, True)]
)
def test_task_engines_keep_stale_caches_if_configured(
    tasks: dict[str, Any] | None, stale: bool
) -> None:
    settings = settings_of(tasks=tasks)
    serving = own_server(settings, Path("/log"), memory_bytes=None)
    config, device = ModelConfig.from_hf({**BASE, **ODD["qwen3"]}), torch.device("cpu")
    kinds: tuple[type[SglangServer | VllmServer], ...] = (SglangServer, VllmServer)
    for kind in kinds:
        server = kind(config, "float32", serving, tensor_ranks=1, device=device)
        dialect = server.dialect(HttpClient(Address("unix:/none")))
        assert isinstance(dialect, (SglangDialect, VllmDialect))
        assert dialect._stale_cache == stale
    if tasks is not None:
        assert native(settings, random_decoder(config), str)._stale_cache == stale
