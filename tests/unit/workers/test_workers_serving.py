"""Servers of workers, by the configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slurmrl.config.schema import Rollout
from slurmrl.plan.settings import Settings
from slurmrl.workers.serving import own_server


def settings_of(**rollout: Any) -> Settings:
    config = SimpleNamespace(
        rollout=Rollout(python="/server/bin/python", **rollout),
        actor=SimpleNamespace(tokenizer="/model"),
    )
    return cast(Settings, SimpleNamespace(config=config))


@pytest.mark.parametrize(
    ("rollout", "needed"),
    [({}, False), ({"min_new_tokens": 2}, True), ({"stop_strings": ["</answer>"]}, True)],
)
def test_servers_get_the_tokenizer_where_requests_need_text(
    rollout: dict[str, Any], needed: bool
) -> None:
    serving = own_server(settings_of(**rollout), Path("/log"), memory_bytes=None)
    assert serving.tokenizer == (Path("/model") if needed else None)
    assert serving.text == needed


@pytest.mark.parametrize("replays", [False, True])
def test_servers_record_experts_where_they_are_replayed(replays: bool) -> None:
    settings = settings_of(replay_experts=replays)
    assert own_server(settings, Path("/log"), memory_bytes=None).experts == replays
