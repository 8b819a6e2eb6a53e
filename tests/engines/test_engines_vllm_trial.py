"""A whole trial that generates with a real vLLM server of its own; the server and a worker are
killed.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.rollout_trials import site_in
from tests.support.served_trials import grpo
from tests.support.servers import check_served, servers
from tests.support.trials import (
    ARCHITECTURE,
    parent,
    processes,
    wait_until,
)

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.soak,  # the trial with SGLang and the kills of vLLM's server run more often
    pytest.mark.skipif(not PYTHON, reason="no vLLM: run scripts/test-engines"),
]
STEPS = 40
SLEEPS = "sleep mode is not supported on CPU, ignore it"
"""What vLLM says on a CPU where it would free its memory, or get it back."""


def test_a_trial_whose_server_and_worker_are_killed_ends_with_the_weights_that_it_trained(
    tmp_path: Path,
) -> None:
    """The server sleeps while the actor, whose worker it shares, trains.

    The requests of a killed server are issued again while the trainers wait. A killed worker takes
    its server with it; the next incarnation has another one, and resumes from the last commit.
    Nothing is left when the trial ends.
    """
    site = site_in(tmp_path, {}, pause_s=0.0)
    rollout = {"backend": "vllm:d1", "gpus": "0", "python": PYTHON, "max_new_tokens": 8}
    config = grpo(rollout, batch_size=8, total_steps=STEPS)
    config["actor"]["architecture"] = {**ARCHITECTURE, "hidden_size": 64}  # heads of 32
    path = site.write("grpo.yaml", config)
    site.slurmrl("submit", str(path), "--scheduler", "local", "--detach")
    run = site.paths("grpo/1").run
    site.wait_for_step("grpo/1", 2, timeout_s=400.0)
    first = wait_until("the server", lambda: servers(run))[0]
    os.kill(first.pid, signal.SIGKILL)
    reached = site.metrics("grpo/1")[-1]["step"]
    site.wait_for_step("grpo/1", reached + 3, timeout_s=400.0)
    second = wait_until("the second server", lambda: servers(run))[0]
    worker = parent(Path("/proc", str(parent(Path("/proc", str(second.pid))))))
    assert worker in processes(run)["worker"]
    os.kill(worker, signal.SIGKILL)
    status = site.wait_for_end("grpo/1", timeout_s=500.0)
    assert status["state"] == "COMPLETED"
    assert status["incarnation"] == 2, "the server's end disturbed nobody, the worker's all"
    check_served(site.metrics("grpo/1"), STEPS)
    assert "is started again" in (run / "logs" / "trainer" / "0.0.log").read_text()
    log = (run / "logs" / "trainer" / "vllm.0.log").read_text()
    assert log.count(SLEEPS) >= STEPS, "it sleeps in every step"
    wait_until("the end of all processes", lambda: not any(processes(run).values()))
    assert servers(run) == []
    assert not first.folder.exists()
    assert not second.folder.exists()
