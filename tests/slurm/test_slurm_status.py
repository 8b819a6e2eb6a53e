"""Tests of ``slurmrl status`` of a trial on a real Slurm: the reason for waiting, the remaining
chain, and the ends of its jobs.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from tests.support.rotation import ENDS, in_turn
from tests.support.trials import Site, processes, sft_config, wait_until

TRIAL = "sft/1"


pytestmark = pytest.mark.usefixtures("bed")


def submit(site: Site, **slurm: Any) -> None:
    """Submit a trial on two hosts with one worker each, which runs longer than every test."""
    cluster = {
        "workers_per_host": 1,
        "gpus_per_worker": 0,
        "interface": "lo",
        "slurm": {"partition": "main", "time": "30", "links": 4, **slurm},
    }
    path = site.write("sft.yaml", sft_config(total_steps=100_000, cluster=cluster))
    site.slurmrl("submit", str(path), "--scheduler", "slurm")


def test_status_shows_pending_reason_and_remaining_jobs(site: Site) -> None:
    submit(site, extra_lines=["--begin=now+1day"])

    def reason() -> dict[str, Any] | None:
        status = site.status(TRIAL)
        return status if (status["pending"] or {}).get("reason") == "BeginTime" else None

    status = wait_until("Slurm's reason", reason)
    assert status["state"] == "PENDING"
    assert status["links_left"] == 3
    assert status["incarnations"] == []
    assert status["pending"]["since_s"] >= 0
    assert "earliest start time has not come" in status["pending"]["words"]
    assert status["findings"][0]["code"] == "pending"
    assert f"(BeginTime): {status['pending']['words']}" in status["diagnosis"]
    for text in (site.slurmrl("status").stdout, site.slurmrl("status", TRIAL).stdout):
        assert "earliest start time has not come" in text
    site.slurmrl("cancel", TRIAL)
    assert site.status(TRIAL)["state"] == "CANCELLED"


@pytest.mark.long
@in_turn(1, ENDS)
def test_killed_batch_process_is_reported(site: Site) -> None:
    submit(site)
    site.wait_for_step(TRIAL, 5)
    status = site.status(TRIAL)
    assert status["links_left"] == 3
    assert 0 < status["link"]["time_left_s"] <= 1800
    assert status["timing"]["signal_lead_s"] == 120
    (supervisor,) = processes(site.paths(TRIAL).run)["supervisor"]
    os.kill(supervisor, signal.SIGKILL)

    def second() -> dict[str, Any] | None:
        status = site.status(TRIAL)
        trains = status["incarnation"] == 2 and status["phase"] == "running"
        return status if trains else None

    status = wait_until("the next link to train", second)
    assert status["links_left"] == 2
    killed, running = status["incarnations"]
    assert killed["cause"] == "killed"
    assert "SIGKILL" in killed["how"]
    assert killed["job_id"] in killed["how"]
    assert len(killed["hosts"]) == len(running["hosts"]) == 2
    assert (killed["link"], running["link"]) == (0, 1)
    assert running["cause"] == "running"
    assert killed["how"] in site.slurmrl("status", TRIAL).stdout
    events = site.slurmrl("events", TRIAL, "--kind", "ready", "--json").stdout.splitlines()
    assert [json.loads(line)["writer"] for line in events] == ["master.1", "master.2"]
