"""Trials whose completions come from stand-ins for SGLang servers, which sample from transformers'
model with the weights that they got.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.held import NO_LIMIT, Hold
from tests.support.rollout_trials import site_in
from tests.support.rotation import TASK_KILLS, in_turn
from tests.support.served_trials import grpo
from tests.support.stand_ins import Started
from tests.support.trials import ARCHITECTURE, processes, wait_until


@pytest.fixture
def started() -> Iterator[list[Started]]:
    servers: list[Started] = []
    yield servers
    for server in servers:
        server.end()


@in_turn(5, TASK_KILLS)
def test_trial_survives_external_servers_that_restart(
    tmp_path: Path, started: list[Started]
) -> None:
    """Requests wait while both servers are down.

    A server that returns gets the run's weights before its first request.
    """
    sockets = [tmp_path / "first", tmp_path / "second"]
    started.append(Started(tmp_path, ARCHITECTURE, "first", str(sockets[0])))
    started.append(Started(tmp_path, ARCHITECTURE, "second", str(sockets[1]), "--says", "bfloat16"))
    rollout = {"backend": "sglang", "servers": [f"unix:{path}" for path in sockets]}
    site = site_in(tmp_path, {}, pause_s=0.0)
    hold = Hold(site)
    hold.allow(2)
    path = site.write("grpo.yaml", hold.judged(grpo(rollout)))
    site.slurmrl("submit", str(path), "--scheduler", "local", "--detach")
    site.wait_for_step("grpo/1", 2)
    for server in started:
        server.end()
    hold.allow(NO_LIMIT)
    again = Started(tmp_path, ARCHITECTURE, "again", str(sockets[0]))
    started.append(again)
    status = site.wait_for_end("grpo/1")
    assert (status["state"], status["incarnation"]) == ("COMPLETED", 1)
    lines = site.metrics("grpo/1")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert min(line["actor_grad_norm"] for line in lines) > 0.0, "every step changes the weights"
    assert max(abs(line["mismatch/kl"]) for line in lines) < 1e-5
    assert all(0.0 < line["update_kept"] <= 1.0 for line in lines), "one says that it rounds"
    asked = [json.loads(line) for line in again.record.read_text().splitlines()]
    drawing = [path for path, body in asked if "logit_bias" not in body and path != "/server_info"]
    assert drawing.index("/update_weights_from_disk") < drawing.index("/generate")
    run = site.paths("grpo/1").run
    assert list((run / "weights").iterdir()) == []
    wait_until("the end of all processes", lambda: not any(processes(run).values()))
    assert again.runs
