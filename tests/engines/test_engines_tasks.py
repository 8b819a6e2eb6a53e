"""Whole trials of rollout tasks that keep a real server: the server is killed, then its worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.rollout_trials import (
    BATCH,
    STEPS,
    config_of,
    of_group,
    site_in,
    train_adapters,
    trained,
)
from tests.support.servers import check_served, servers
from tests.support.trials import processes, wait_until

PYTHON = {engine: os.environ.get(f"{engine.upper()}_PYTHON", "") for engine in ("sglang", "vllm")}
pytestmark = pytest.mark.soak  # tests/distributed runs such a trial with a stand-in of SGLang
STARTED_S = 500.0
"""For steps behind the start of a server."""


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(
            engine,
            marks=pytest.mark.skipif(not python, reason=f"no {engine}: run scripts/test-engines"),
        )
        for engine, python in PYTHON.items()
    ],
)
def test_a_task_draws_with_the_weights_of_each_step_whatever_is_killed(
    engine: str, tmp_path: Path
) -> None:
    """Without staleness, the log-probabilities of all samples are those of the merged weights that
    they train: also behind the second start of the server, and behind that of another task. Nothing
    is left of the servers.
    """
    site, trial = site_in(tmp_path, {}), f"grpo/{engine}"
    config = config_of(engine, {"max": 1, "max_staleness": 0})
    config["rollout"] |= {"backend": f"{engine}:d1", "python": PYTHON[engine]}
    train_adapters(config, tmp_path / "source", hidden_size=64)  # heads of 32, for vLLM
    path = site.write("tasks.yaml", config)
    site.slurmrl("submit", str(path), "--scheduler", "local", "--detach")
    run = site.paths(trial).run
    site.wait_for_step(trial, 3, timeout_s=STARTED_S)
    (first,) = servers(run)
    os.kill(first.pid, signal.SIGKILL)
    reached = site.metrics(trial)[-1]["step"]
    site.wait_for_step(trial, reached + 3, timeout_s=STARTED_S)
    assert "is started again" in (run / "logs" / "rollout" / "0.0.log").read_text()
    (second,) = servers(run)
    assert second.folder == first.folder
    os.kill(of_group(site, trial, "worker", "rollout")[0], signal.SIGKILL)
    status = site.wait_for_end(trial, timeout_s=STARTED_S)
    assert (status["state"], status["incarnation"]) == ("COMPLETED", 1)
    assert trained(site, trial) == STEPS * BATCH, "no item was trained twice, and none is missing"
    check_served(site.metrics(trial), STEPS)
    wait_until("all processes to leave", lambda: not any(processes(run).values()))
    assert servers(run) == []
    assert not first.folder.exists()
