"""Trials of models of transformers that tensor ranks share."""

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

MODEL = tiny("gemma3_text", vocab_size=16)
"""Some of its layers have a window, and its norms of heads have a part of the gradient on each
rank."""
ONE = {"max": 1, "max_staleness": 0}


def begin(site: Site, trial: str, tasks: dict[str, Any] | None, *arguments: str) -> None:
    config = config_of(trial, tasks)
    config["total_steps"] = 4
    config["actor"] |= {"architecture": MODEL, "implementation": "hf", "backend": "fsdp:d1t2"}
    config["ref"] = {"ema": 0.3}
    if tasks is not None:
        config["rollout"]["backend"] = "native:t2"
    path = site.write(f"{trial}.yaml", config)
    site.slurmrl("submit", str(path), "--scheduler", "local", *arguments)


def completions(site: Site, trial: str) -> list[Any]:
    rows = read_samples(site.paths(trial).samples).rows
    return sorted((row["step"], row["prompt"], row["completion"]) for row in rows)


def rewards(site: Site, trial: str) -> list[float]:
    names = ("reward", "entropy", "kl")
    return [line[name] for line in site.metrics(trial) for name in names]


@pytest.mark.parametrize("tasks", rotating(None, ONE, first=3, shares=HF_TRIALS))
def test_tensor_ranks_sample_the_same_tokens_after_kills_and_in_tasks(
    tmp_path: Path, tasks: dict[str, Any] | None
) -> None:
    """A killed trial has the same bits as an undisturbed one. Its reference is a moving average of
    the actor's parts.
    """
    site = site_in(tmp_path, {}, pause_s=0.6)
    if tasks is None:
        begin(site, "other", None, "--detach")
        site.wait_for_step("grpo/other", 2)
        os.kill(of_group(site, "grpo/other", "worker", "trainer")[1], signal.SIGKILL)
        wait_until("the next incarnation", lambda: site.status("grpo/other")["incarnation"] == 2)
    hurry(site)
    begin(site, "plain", None, "--wait")
    if tasks is not None:
        begin(site, "other", tasks, "--wait")
    assert site.wait_for_end("grpo/other")["state"] == "COMPLETED"
    plain = completions(site, "grpo/plain")
    assert len({step for step, *_ in plain}) == 4
    assert completions(site, "grpo/other") == plain
    close = 0.0 if tasks is None else 1e-3
    assert rewards(site, "grpo/other") == pytest.approx(
        rewards(site, "grpo/plain"), rel=0, abs=close
    )
