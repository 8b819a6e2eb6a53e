"""``slurmrl doctor --job`` on the nodes of a real Slurm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import GroupRequest, SubmissionRequest
from slurmrl.scheduler.batch_script import rejections
from slurmrl.scheduler.client import SlurmClient
from tests.support.nodes import queued
from tests.support.trials import Site, sft_config


def look(site: Site, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    done = site.slurmrl("doctor", *arguments, "--scheduler", "slurm", "--json", code=code)
    found: list[dict[str, Any]] = json.loads(done.stdout)["checks"]
    return found


def test_doctor_checks_run_on_two_nodes(site: Site) -> None:
    """Runs without a configuration. The nodes share this machine's network."""
    checks = look(site, "--job")
    assert [one for one in checks if one["state"] == "failed"] == []
    hosts = {one["where"] for one in checks if one["name"] == "same directory"}
    assert len(hosts) == 2
    names = {one["name"] for one in checks}
    assert {"connections", "clock difference", "scontrol in jobs", "sbatch in jobs"} <= names
    (delays,) = [one for one in checks if one["name"] == "directory between hosts"]
    assert set(delays["values"]) == {"there_s", "back_s"}
    assert not site.root.exists()
    assert queued() == []


def test_doctor_counts_gpus_given_by_slurm(site: Site) -> None:
    cluster = {"workers_per_host": 2, "gpus_per_worker": 1, "interface": "lo"}
    config = sft_config(cluster={**cluster, "slurm": {"partition": "main"}})
    path = site.write("sft.yaml", config)
    checks = look(site, str(path), "--job", code=1)  # the fake GPUs have no driver
    given = [one["values"]["given"] for one in checks if one["name"] == "gpus"]
    assert given == [2.0, 2.0]
    failed = {one["name"] for one in checks if one["state"] == "failed"}
    assert failed <= {"gpu driver", "torch", "torch on gpus"}


def test_doctor_checks_the_container_on_every_node(site: Site, tmp_path: Path) -> None:
    """Set-up lines put a stand-in for the container program on PATH."""
    program = tmp_path / "bin" / "stand-in"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nshift 2\nexec env -i PATH=/usr/bin:/bin "$@"\n')
    program.chmod(0o700)
    slurm = {
        "partition": "main",
        "setup": [f"export PATH={program.parent}:$PATH"],
        "container": "stand-in exec image.sif",
    }
    path = site.write("sft.yaml", sft_config(cluster={"gpus_per_worker": 0, "slurm": slurm}))
    checks = look(site, str(path), "--job")
    for name in ("container", "same directory in container", "packages in container"):
        found = [one for one in checks if one["name"] == name]
        assert [one["state"] for one in found] == ["ok"] * 2
        assert len({one["where"] for one in found}) == 2
    path = site.write(
        "other.yaml",
        sft_config(cluster={"gpus_per_worker": 0, "slurm": {**slurm, "setup": []}}),
    )
    checks = look(site, str(path), "--job", code=1)
    (first, second) = [one["measured"] for one in checks if one["state"] == "failed"]
    assert first == second == "cannot start 'stand-in': No such file or directory"


def test_doctor_reports_a_job_that_stays_pending(site: Site) -> None:
    slurm = {"partition": "main", "extra_lines": ["--begin=now+1hour"]}
    path = site.write("sft.yaml", sft_config(cluster={"gpus_per_worker": 0, "slurm": slurm}))
    checks = look(site, str(path), "--job", "--timeout", "3", code=1)
    (job,) = [one for one in checks if one["name"] == "job"]
    assert "PENDING" in job["measured"]
    assert "after 3 s; it was cancelled" in job["measured"]
    assert queued() == []
    assert not site.root.exists()


def test_each_directive_rejected_by_sbatch_is_named(tmp_path: Path) -> None:
    slurm = {
        "constraint": "fast",
        "reservation": "none",
        "time": "30",
        "extra_lines": ["--exclusive", "--frobnicate"],
    }
    request = SubmissionRequest(
        number=1,
        uuid="0123456789abcdef",
        trial="experiment/trial",
        run=RunPaths(tmp_path),
        python="/usr/bin/python3",
        groups=(GroupRequest(name="trainer", hosts=1, workers_per_host=1, links=8),),
        options={"slurm": slurm},
    )
    found = {one.directive: one.words for one in rejections(SlurmClient(), request)}
    assert found.keys() == {"#SBATCH --frobnicate", "constraint", "reservation"}
    assert "unrecognized option" in found["#SBATCH --frobnicate"]
    assert "feature" in found["constraint"]
