"""Servers of workers, by the configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slurmrl.config.schema import Rollout
from slurmrl.plan.settings import Settings
from slurmrl.workers.serving import own_server


@pytest.mark.parametrize(
    ("rollout", "needed"),
    [({}, False), ({"min_new_tokens": 2}, True), ({"stop_strings": ["</answer>"]}, True)],
)
def test_servers_get_the_tokenizer_where_requests_need_text(
    rollout: dict[str, Any], needed: bool
) -> None:
    config = SimpleNamespace(
        rollout=Rollout(python="/server/bin/python", **rollout),
        actor=SimpleNamespace(tokenizer="/model"),
    )
    settings = cast(Settings, SimpleNamespace(config=config))
    serving = own_server(settings, Path("/log"), memory_bytes=None)
    assert serving.tokenizer == (Path("/model") if needed else None)
    assert serving.text == needed
