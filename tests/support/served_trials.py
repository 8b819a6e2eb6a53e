"""Short GRPO trials whose completions come from servers."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.rollout_trials import site_in
from tests.support.servers import UsersServer, check_served
from tests.support.trials import processes, sft_config, wait_until


def grpo(rollout: dict[str, Any], *, batch_size: int = 4, **changes: Any) -> dict[str, Any]:
    """The configuration of a trial; ``rollout`` says where the servers are."""
    config = sft_config(
        experiment="grpo",
        algorithm={"name": "grpo", "batch_size": batch_size, "n_minibatches": 1},
        rollout={"n": 4, "max_new_tokens": 6, **rollout},
        reward={"name": "reward_of_mine:different"},
        **changes,
    )
    config["actor"]["optimizer"] = {"lr": 1e-2}
    config["dataset"] = {**config["dataset"], "type": "prompt", "max_prompt_tokens": 16}
    return config


def run_through_kills(
    tmp_path: Path,
    server: UsersServer,
    backend: str,
    model: Mapping[str, Any],
    *,
    steps: int,
) -> None:
    """Run a trial whose server and a worker are killed and started again; check that it ends as it
    should and leaves nothing.
    """
    site = site_in(tmp_path, {}, pause_s=0.0)
    rollout = {
        "backend": backend,
        "servers": [f"unix:{server.socket}"],
        "max_new_tokens": 8,
    }
    config = grpo(rollout, batch_size=8, total_steps=steps)
    config["actor"]["architecture"] = model
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
    check_served(site.metrics("grpo/1"), steps)
    assert not any((run / "weights").iterdir())
    wait_until("the end of all processes", lambda: not any(processes(run).values()))
