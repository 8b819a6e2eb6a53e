"""``slurmrl profile-cluster`` on the nodes of a real Slurm."""

from __future__ import annotations

from pathlib import Path

from slurmrl.plan.estimates import hardware
from tests.support.nodes import queued
from tests.support.trials import Site, sft_config


def test_profile_cluster_measures_the_network_of_two_nodes(site: Site, tmp_path: Path) -> None:
    cluster = {"gpus_per_worker": 0, "slurm": {"partition": "main"}}
    path, output = site.write("sft.yaml", sft_config(cluster=cluster)), tmp_path / "cpu.yaml"
    words = ("--hosts", "2", "--ranks", "1", "--scheduler", "slurm", "--output", str(output))
    done = site.slurmrl("profile-cluster", str(path), *words)
    assert "a job of 2 hosts with 1 rank each on slurm" in done.stderr
    found = hardware.read_file(output).measured
    assert found.network is not None
    assert found.network_latency is not None
    assert found.link is None, "a host has one rank"
    assert found.overlap is not None
    assert queued() == []
