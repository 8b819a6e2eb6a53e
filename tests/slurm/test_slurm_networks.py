"""Tests of a cut network and of wrong host names, on nodes with their own host names, addresses and
ports. Skipped without root.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmrl.scheduler.base import JobState
from slurmrl.scheduler.slurm import SlurmScheduler
from tests.scheduler_contract import STAY, pids, request_of, state, submitted
from tests.support.beds import bed, run_bed
from tests.support.held import NO_LIMIT, Hold
from tests.support.trials import Site, sft_config, wait_until

pytestmark = pytest.mark.long

NODES = 3


@pytest.fixture
def network_bed() -> Iterator[Path]:
    options = ("--networks", "--nodes", str(NODES), "--gpus", "1")
    with bed(*options, needs=("of their own need", "Operation not permitted")) as directory:
        yield directory


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def node_state(node: str) -> str:
    return slurm("sinfo", "-h", "-n", node, "-p", "main", "-o", "%T").strip()


def config(**more: Any) -> dict[str, Any]:
    cluster = {
        "workers_per_host": 1,
        "gpus_per_worker": 0,
        "lease_ttl_s": 20,
        "slurm": {"partition": "main", "time": "30", **more},
    }
    return {**sft_config(), "cluster": cluster}


def start(site: Site, trial: str, **more: Any) -> None:
    """Start a trial that is held after its third step."""
    Hold(site).allow(3)
    path = site.write("sft.yaml", Hold(site).sft(config(**more)))
    site.slurmrl("submit", str(path), "--scheduler", "slurm")
    site.wait_for_step(trial, 3)


def test_every_node_has_its_own_name_and_address(network_bed: Path) -> None:
    said = slurm("srun", "-N2", "-w", "n0,n1", "bash", "-c", "hostname; hostname -I")
    lines = said.split()
    assert {"n0", "n1"} < set(lines)
    assert len({line for line in lines if line.startswith("10.")}) == 2


def test_job_of_a_disconnected_node_continues_elsewhere(network_bed: Path, tmp_path: Path) -> None:
    scheduler = SlurmScheduler()
    request = request_of(tmp_path, STAY, links=1)
    with submitted(scheduler, request) as jobs:
        wait_until("the job", lambda: pids(request))
        (task,) = scheduler.query(jobs)
        (node,) = task.hosts
        run_bed("cut", node, "--dir", str(network_bed))
        wait_until("Slurm to give the node up", lambda: node_state(node).startswith("down"))
        wait_until("the job elsewhere", lambda: len(pids(request)) == 2)
        assert state(scheduler, jobs, 0) is JobState.RUNNING
        (task,) = scheduler.query(jobs)
        assert task.hosts != (node,)
        assert task.restarts == 1
        run_bed("join", node, "--dir", str(network_bed))
        wait_until("the node to come back", lambda: node_state(node) == "idle")


@pytest.mark.soak
def test_trial_survives_a_network_loss_of_one_host(network_bed: Path, tmp_path: Path) -> None:
    """Two of three nodes train. One loses its network, and the third node replaces it."""
    site = Site(tmp_path, {"SLURM_CONF": str(network_bed / "slurm.conf")})
    start(site, "sft/1")
    hosts = [task["host"] for group in site.status("sft/1")["groups"] for task in group["tasks"]]
    run_bed("cut", hosts[1], "--dir", str(network_bed))
    Hold(site).allow(NO_LIMIT)
    ended = site.wait_for_end("sft/1", 400)
    assert (ended["state"], ended["step"]) == ("COMPLETED", 8)
    assert ended["incarnation"] >= 2
    steps = [line["step"] for line in site.metrics("sft/1")]
    assert steps == sorted(set(steps))


def test_trial_runs_with_wrong_host_names(network_bed: Path, tmp_path: Path) -> None:
    """Hosts report the same name, or one that cannot be resolved."""
    for node in ("n0", "n1", "n2"):
        run_bed("rename", node, "localhost", "--dir", str(network_bed))
    site = Site(tmp_path, {"SLURM_CONF": str(network_bed / "slurm.conf")})
    start(site, "sft/1")
    found = json.loads(site.slurmrl("status", "sft/1", "--json").stdout)
    hosts = {task["host"] for group in found["groups"] for task in group["tasks"]}
    assert len(hosts) == 2
    assert hosts < {"n0", "n1", "n2"}
    site.slurmrl("cancel", "sft/1")
