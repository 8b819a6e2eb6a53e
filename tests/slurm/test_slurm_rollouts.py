"""A trial on a real Slurm whose completions are made by an array of tasks."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from slurmrl.monitor import events
from slurmrl.scheduler.submission import read_jobs
from tests.support.rollout_trials import BATCH, STEPS, config_of, settled, site_in
from tests.support.trials import wait_until


@pytest.mark.long
def test_tasks_that_are_cancelled_are_replaced_and_nothing_is_lost(
    tmp_path: Path, slurm_bed: Any
) -> None:
    site = site_in(tmp_path, {"SLURM_CONF": str(slurm_bed.conf)})
    slurm = {"partition": "main", "time": "30"}
    config = config_of("slurm", {"max": 2, "max_staleness": 1})
    config["cluster"] = {"gpus_per_worker": 0, "interface": "lo", "slurm": slurm}
    site.slurmrl("submit", str(site.write("grpo.yaml", config)), "--scheduler", "slurm")
    trial = "grpo/slurm"
    site.wait_for_step(trial, 2)
    jobs = read_jobs(site.paths(trial), 1)
    assert jobs is not None
    first = [f"{jobs['rollout'][0]}_{task}" for task in range(2)]
    subprocess.run(["scancel", *first], check=True)
    status = site.wait_for_end(trial)
    assert (status["state"], status["step"], status["incarnation"]) == ("COMPLETED", STEPS, 1)
    assert settled(site, trial) == STEPS * BATCH
    told = [one for one in events.read_all(site.paths(trial)) if one["kind"] == "rollout_task"]
    joined = {one["task"] for one in told if one["state"] == "joined"}
    assert joined & {"rollout/0", "rollout/1"}
    assert joined & {"rollout/2", "rollout/3"}

    def queue() -> str:
        command = ["squeue", "-h", "-t", "PD,R,CG"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    wait_until("an empty queue", lambda: not queue())
