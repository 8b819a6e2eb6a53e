"""Tests of the properties that slurmrl reads from a real Slurm."""

from __future__ import annotations

from slurmrl.desk import initial_files
from slurmrl.desk.initial_files import survey
from tests.slurm.conftest import GPUS, NODES


def test_init_site_reads_cluster_information() -> None:
    found = survey()
    assert found.cluster.startswith("bed (Slurm ")
    assert [one.name for one in found.partitions] == ["main", "low", "high"]
    main = found.partitions[0]
    assert (main.is_default, main.is_up, main.hosts) == (True, True, NODES)
    assert (main.most_gpus, main.kinds[0].cpus) == (GPUS, 8)
    assert any(line.startswith(("your accounts", "accounts")) for line in found.missing)
    asked = initial_files.first_questions(found, "/shared/runs")
    assert [one.proposal for one in asked] == ["/shared/runs", "main"]
