"""Trials of transformers' models whose rollout tasks generate."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from slurmrl.desk.report.report_data import read_samples
from tests.support.families import tiny
from tests.support.rollout_trials import config_of, hurry, of_group, site_in
from tests.support.rotation import HF_TRIALS, rotating
from tests.support.trials import Site, wait_until

HYBRID = tiny("qwen3_5_text", vocab_size=16)
"""A family that the built-in decoder does not run: layers of linear attention have no keys."""


def begin(
    site: Site, trial: str, tasks: dict[str, Any] | None, *arguments: str, backend: str = ""
) -> None:
    config = config_of(trial, tasks)
    if backend:
        config["rollout"]["backend"] = backend
    config["total_steps"] = 5
    config["actor"] |= {"architecture": HYBRID, "implementation": "hf"}
    path = site.write(f"{trial}.yaml", config)
    site.slurmrl("submit", str(path), "--scheduler", "local", *arguments)


@pytest.mark.parametrize("backend", rotating("native:d1", "native:t2", shares=HF_TRIALS))
def test_tasks_sample_the_tokens_of_trainers_despite_kills(tmp_path: Path, backend: str) -> None:
    """A rollout worker is killed, then a rank of the trainers. Weight versions bring the weights to
    the tasks. The workers of a task with several ranks share one model by tensor parallelism.
    """
    site = site_in(tmp_path, {}, pause_s=0.6)
    begin(site, "tasks", {"max": 1, "max_staleness": 0}, "--detach", backend=backend)
    site.wait_for_step("grpo/tasks", 1)
    workers = of_group(site, "grpo/tasks", "worker", "rollout")
    assert len(workers) == (2 if backend == "native:t2" else 1)
    os.kill(workers[-1], signal.SIGKILL)
    site.wait_for_step("grpo/tasks", 3)
    os.kill(of_group(site, "grpo/tasks", "worker", "trainer")[0], signal.SIGKILL)
    wait_until("the next incarnation", lambda: site.status("grpo/tasks")["incarnation"] == 2)
    hurry(site)
    status = site.wait_for_end("grpo/tasks")
    assert (status["state"], status["incarnation"]) == ("COMPLETED", 2)
    begin(site, "alone", None, "--wait")
    texts, rewards = [], []
    for trial in ("grpo/tasks", "grpo/alone"):
        rows = read_samples(site.paths(trial).samples).rows
        texts.append(sorted((row["step"], row["prompt"], row["completion"]) for row in rows))
        metrics = site.metrics(trial)
        rewards.append([value for line in metrics for value in (line["reward"], line["entropy"])])
    assert texts[0] == texts[1]
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-3)
