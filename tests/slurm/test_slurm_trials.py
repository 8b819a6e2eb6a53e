"""Whole trials on a real Slurm, through the command line only."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmrl.run import events
from tests.support.held import NO_LIMIT, Hold
from tests.support.nodes import queued, slurm, wait_for_empty_queue
from tests.support.rotation import in_turn
from tests.support.trials import REPOSITORY, Site, processes, sft_config, wait_until

FAKE_GPUS = REPOSITORY / "tests" / "support" / "fake_gpus"
USE_FAKE_GPUS = f"export PYTHONPATH={FAKE_GPUS}"
"""A set-up line for jobs whose workers get GPUs; see `with_fake_gpus` for the command line."""
TWO_NODES: dict[str, Any] = {
    "workers_per_host": 1,
    "gpus_per_worker": 0,
    "interface": "lo",
    "slurm": {"partition": "main", "time": "30"},
}


def with_fake_gpus(site: Site) -> Site:
    return replace(site, environment={**site.environment, "PYTHONPATH": str(FAKE_GPUS)})


def on_slurm(config: dict[str, Any], **cluster: Any) -> dict[str, Any]:
    return {**config, "cluster": {**TWO_NODES, **cluster}}


def submit(site: Site, config: dict[str, Any], *arguments: str) -> dict[str, Any]:
    """Submit to Slurm; return the output of ``--json``."""
    path = site.write(f"{config['experiment']}.yaml", config)
    done = site.slurmrl("submit", str(path), "--scheduler", "slurm", "--json", *arguments)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def wait_until_it_depends(job: str) -> None:
    said, show = "PENDING Dependency", ("squeue", "-h", "-j", job, "-o", "%T %r")
    wait_until(f"{job} to be {said}", lambda: slurm(*show) == said)


def tasks(site: Site, trial: str) -> list[dict[str, Any]]:
    return [task for group in site.status(trial)["groups"] for task in group["tasks"]]


def gpus(site: Site, trial: str) -> dict[str, list[str]]:
    """Return CUDA_VISIBLE_DEVICES of each worker on each host, from the agents' events."""
    told = events.read_all(site.paths(trial))
    host_of = {event["writer"]: event["host"] for event in told if "host" in event}
    return {host_of[e["writer"]]: e["gpus"] for e in told if e["kind"] == "join"}


def visible_devices(run: Path) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES in the initial environment of each worker process, from the
    kernel.
    """
    found = []
    for pid in processes(run)["worker"]:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        found += [w.partition("=")[2] for w in words if w.startswith("CUDA_VISIBLE_DEVICES=")]
    return sorted(found)


def batch_pid(trial_run: Path) -> int:
    """Return the supervisor of a run: the batch process of its running job."""
    return wait_until(
        f"the batch process of {trial_run}", lambda: processes(trial_run)["supervisor"]
    )[0]


def submit_example(site: Site, name: str, *overrides: str) -> None:
    """Submit an example of this repository on two nodes with one fake GPU and one worker each."""
    cluster = (
        *("workers_per_host=1", "gpus_per_worker=1", "interface=lo", "slurm.partition=main"),
        f"slurm.setup=['{USE_FAKE_GPUS}']",
    )
    where = [f"cluster.{setting}" for setting in cluster]
    path = str(REPOSITORY / "examples" / f"{name}.yaml")
    site.slurmrl("submit", path, *overrides, *where, "--scheduler", "slurm")


@in_turn(0, 2)
def test_ppo_example_on_two_nodes_shows_status_and_logs(site: Site) -> None:
    site = with_fake_gpus(site)
    submit_example(site, "sft", "total_steps=2", "evaluation.samples=16")
    assert site.wait_for_end("addition-sft/1")["state"] == "COMPLETED"
    few = ("algorithm.batch_size=64", "evaluation.samples=16", "evaluation.every_steps=2")
    trial, hold = "addition-ppo/1", Hold(site)
    hold.allow(1)  # else it may end before this test looks
    held = [f"{key}={value}" for key, value in hold.settings(trial).items()]
    submit_example(site, "ppo", "total_steps=3", *few, *held)
    site.wait_for_step(trial, 1)
    running = site.status(trial)
    assert running["state"] == "RUNNING"
    assert running["total_steps"] == 3
    found = tasks(site, trial)
    assert [task["state"] for task in found] == ["RUNNING", "RUNNING"]
    assert len({task["host"] for task in found}) == 2
    assert "incarnation 1" in site.slurmrl("logs", trial).stdout
    given = gpus(site, trial)
    assert len(given) == 2
    used = sorted(gpu for own in given.values() for gpu in own)
    assert visible_devices(site.paths(trial).run) == used
    hold.allow(NO_LIMIT)
    ended = site.wait_for_end(trial)
    assert (ended["state"], ended["step"]) == ("COMPLETED", 3)
    wait_until("the chain to be gone from the queue", lambda: not queued("-t", "PD,R"))


@pytest.mark.long
@in_turn(1, 2)
def test_two_trials_share_nodes(site: Site) -> None:
    """Both trials run at the same time on the same two nodes, with different devices."""
    site = with_fake_gpus(site)
    nodes = {"partition": "main", "time": "30", "nodelist": "n[0-1]", "setup": [USE_FAKE_GPUS]}
    hold = Hold(site)
    hold.allow(1)
    config = on_slurm(hold.sft(sft_config()), gpus_per_worker=1, slurm=nodes)
    submit(site, {**config, "trial": "a"})
    submit(site, {**config, "trial": "b", "seed": 2})
    for trial in ("sft/a", "sft/b"):
        site.wait_for_step(trial, 1)
    used = [
        (host, gpu)
        for trial in ("sft/a", "sft/b")
        for host, given in gpus(site, trial).items()
        for gpu in given
    ]
    assert len(set(used)) == len(used) == 4
    assert {host for host, _ in used} == {"n0", "n1"}
    hold.allow(NO_LIMIT)
    for trial in ("sft/a", "sft/b"):
        ended = site.wait_for_end(trial)
        assert (ended["state"], ended["step"], ended["incarnation"]) == ("COMPLETED", 8, 1)


def test_dry_run_prints_the_script_and_writes_no_files(site: Site) -> None:
    path = site.write("sft.yaml", on_slurm(sft_config()))
    done = site.slurmrl("submit", str(path), "--scheduler", "slurm", "--dry-run")
    assert "#SBATCH --array=0-7%1" in done.stdout
    assert "#SBATCH --nodes=2" in done.stdout
    assert not site.root.exists()


def test_trial_that_commits_adds_jobs_and_cancels_them_at_its_end(site: Site) -> None:
    slurm = {**TWO_NODES["slurm"], "links": 2}
    submit(site, on_slurm(sft_config(total_steps=100000), slurm=slurm))

    def added() -> dict[str, Any] | None:
        lines = site.slurmrl("events", "sft/1", "--json").stdout.splitlines()
        found = [json.loads(line) for line in lines]
        return next((event for event in found if event["kind"] == "topped_up"), None)

    job = wait_until("more links", added)["job"]
    wait_until_it_depends(job)
    assert site.status("sft/1")["links_left"] == 3
    site.slurmrl("cancel", "sft/1")
    assert site.wait_for_end("sft/1")["state"] == "CANCELLED"
    wait_for_empty_queue()


@pytest.mark.soak
def test_jobs_are_added_by_hand_if_jobs_cannot_call_sbatch(site: Site, tmp_path: Path) -> None:
    """The set-up lines put an sbatch that fails on the PATH of the compute nodes."""
    stub = tmp_path / "no" / "sbatch"
    stub.parent.mkdir()
    stub.write_text("#!/bin/sh\necho 'Access/permission denied' >&2; exit 1\n")
    stub.chmod(0o700)
    slurm = {**TWO_NODES["slurm"], "links": 1, "setup": [f"PATH='{stub.parent}':$PATH"]}
    submit(site, on_slurm(sft_config(total_steps=100000), slurm=slurm))
    site.wait_for_step("sft/1", 1)
    assert site.status("sft/1")["links_left"] == 0
    refused = site.paths("sft/1").extension_job(1, "trainer", 1)
    wait_until("the end of the job's own attempt", refused.exists)  # meanwhile it has the claim
    said = json.loads(site.slurmrl("resume", "sft/1", "--json").stdout)
    second = said["jobs"]["trainer"].split(",")[1]
    wait_until_it_depends(second)
    (group,) = site.status("sft/1")["groups"]
    assert group["links_left"] == 1
    os.kill(batch_pid(site.paths("sft/1").run), signal.SIGKILL)
    wait_until("the added link", lambda: site.status("sft/1")["incarnation"] == 2)
    site.slurmrl("cancel", "sft/1")
    wait_for_empty_queue()
