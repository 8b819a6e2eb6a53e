"""``slurmrl simulate --first-wait slurm`` with the estimate of a real Slurm."""

from __future__ import annotations

import json

from tests.support.nodes import queued, slurm, wait_for_empty_queue
from tests.support.trials import Site, sft_config

LONG_S = 1200


def test_first_job_waits_as_long_as_slurm_expects(site: Site) -> None:
    """Another job holds all nodes for 20 minutes."""
    cluster = {"gpus_per_worker": 0, "slurm": {"partition": "main", "time": "10"}}
    path = site.write("sft.yaml", sft_config(cluster=cluster))
    words = (
        "--first-wait",
        "slurm",
        "--step-seconds",
        "5",
        "--evaluation-seconds",
        "1",
        "--runs",
        "1",
        "--json",
    )

    def wait_s() -> float:
        found = json.loads(site.slurmrl("simulate", str(path), *words).stdout)
        return float(found["time_limits"][0]["runs"][0]["queue_s"])

    free_s = wait_s()
    hosts = len(slurm("sinfo", "-h", "-p", "main", "-N", "-o", "%N").split())
    held = (
        "--parsable",
        "--partition=main",
        f"--nodes={hosts}",
        "--exclusive",
        "--output=/dev/null",
    )
    job = slurm("sbatch", *held, f"--time={LONG_S // 60}", f"--wrap=sleep {LONG_S}")
    try:
        busy_s = wait_s()
        assert len(queued()) == 1, "nothing else is submitted"
    finally:
        slurm("scancel", job)
    assert free_s < 60
    assert LONG_S - 120 < busy_s < LONG_S + 120
    wait_for_empty_queue()
