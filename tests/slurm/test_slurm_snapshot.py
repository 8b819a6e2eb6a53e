"""Tests of code that is edited while a job is pending."""

from __future__ import annotations

import subprocess

from tests.support.own_reward import NAME, rewards, write_reward
from tests.support.rotation import SNAPSHOTS, in_turn
from tests.support.trials import Site, ppo_config


@in_turn(1, SNAPSHOTS)
def test_pending_job_runs_the_submitted_code(site: Site) -> None:
    write_reward(site.folder, 1.0)
    slurm = {"partition": "main", "time": "30", "extra_lines": ["--hold"]}
    cluster = {"workers_per_host": 1, "gpus_per_worker": 0, "interface": "lo", "slurm": slurm}
    config = ppo_config(total_steps=2, evaluation=None, reward={"name": NAME}, cluster=cluster)
    site.slurmrl("submit", str(site.write("ppo.yaml", config)), "--scheduler", "slurm")
    assert site.status("ppo/1")["state"] == "PENDING"
    write_reward(site.folder, 0.25)
    (task, *_) = [one for group in site.status("ppo/1")["groups"] for one in group["tasks"]]
    job = task["job_id"].partition("_")[0]
    subprocess.run(["scontrol", "release", job], check=True)
    assert site.wait_for_end("ppo/1")["state"] == "COMPLETED"
    assert rewards(site.metrics("ppo/1")) == {1: 1.0, 2: 1.0}
