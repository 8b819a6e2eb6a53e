"""A whole trial that sends its weights to a real SGLang server that runs already; the server and a
worker are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmrl.engines.rollout import sglang_server
from tests.support.served_trials import grpo, site_with_reward
from tests.support.servers import UsersServer, check_served, save_config
from tests.support.trials import (
    ARCHITECTURE,
    processes,
    wait_until,
)

PYTHON = os.environ.get("SGLANG_PYTHON", "")
pytestmark = [
    pytest.mark.soak,  # each of its parts is tested with real servers, too
    pytest.mark.skipif(not PYTHON, reason="no SGLang: run scripts/test-engines"),
]
STEPS = 30
MODEL = {**ARCHITECTURE, "hidden_size": 64}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[UsersServer]:
    folder = tmp_path / "server"
    folder.mkdir(mode=0o700)
    save_config(folder / "model", MODEL)
    socket = folder / "server.sock"
    command = sglang_server.command(
        PYTHON,
        folder / "model",
        socket,
        vocabulary=int(MODEL["vocab_size"]),
        options=(*sglang_server.CPU_FLAGS, "--dtype", "float32"),
    )
    made = UsersServer(socket, command, sglang_server.ENVIRONMENT, folder / "sglang.log")
    made.start()
    yield made
    made.kill()


@pytest.mark.parametrize("updates", ["broadcast", "tensors"])
def test_a_trial_whose_server_and_worker_are_killed_ends_with_the_weights_that_it_trained(
    tmp_path: Path, server: UsersServer, updates: str
) -> None:
    """No folder of the trial has weights for the server. One that was started again, and the next
    incarnation, make groups of their own; the requests of the killed server are issued again."""
    site = site_with_reward(tmp_path)
    rollout = {
        "backend": "sglang",
        "servers": [f"unix:{server.socket}"],
        "server_updates": updates,
        "max_new_tokens": 8,
    }
    config = grpo(rollout, batch_size=8, total_steps=STEPS)
    config["actor"]["architecture"] = MODEL
    path = site.write("grpo.yaml", config)
    site.slurmrl("submit", str(path), "--scheduler", "local", "--detach")
    run = site.paths("grpo/1").run
    site.wait_for_step("grpo/1", 2, timeout_s=400.0)
    server.kill()
    server.start()
    reached = site.metrics("grpo/1")[-1]["step"]
    site.wait_for_step("grpo/1", reached + 3, timeout_s=400.0)
    os.kill(next(iter(processes(run)["worker"])), signal.SIGKILL)
    status = site.wait_for_end("grpo/1", timeout_s=500.0)
    assert status["state"] == "COMPLETED"
    assert status["incarnation"] == 2, "the server's end disturbed nobody, the worker's all"
    check_served(site.metrics("grpo/1"), STEPS)
    assert not (run / "weights").exists()
    joined = server.log.read_text().count("init custom process group")
    groups = 3  # both starts of the server, and the second incarnation
    assert joined == (groups if updates == "broadcast" else 0)
    wait_until("the end of all processes", lambda: not any(processes(run).values()))
