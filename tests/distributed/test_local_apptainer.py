"""Workers run in containers of the real Apptainer. Skipped if it is not installed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import apptainer
from tests.support.held import NO_LIMIT, Hold
from tests.support.trials import Site, kill_one, processes, sft_config, wait_until

pytestmark = pytest.mark.long


def start(folder: Path, *options: str, packed: bool) -> Site:
    """Start a trial of two ranks that stops at its third step. Its agent has a token in its
    environment.
    """
    tokens = folder / "tokens"
    tokens.touch(0o600)
    tokens.write_text("MY_TOKEN=handed-on\n")
    cluster: dict[str, Any] = {
        "gpus_per_worker": 0,
        "variables_file": str(tokens),
        "slurm": apptainer.cluster(folder, *options, packed=packed),
    }
    site = Site(folder)
    hold = Hold(site)
    hold.allow(3)
    config = site.write("sft.yaml", hold.sft(sft_config(cluster=cluster)))
    site.slurmrl("submit", str(config), "--scheduler", "local", "--detach")
    site.wait_for_step("sft/1", 3)
    return site


def space(pid: int) -> str:
    """Return the path of the root file system that a process sees."""
    return os.readlink(f"/proc/{pid}/ns/mnt")


def test_doctor_checks_inside_container(tmp_path: Path) -> None:
    slurm = apptainer.cluster(tmp_path, "--cleanenv")
    site = Site(tmp_path)
    config = sft_config(cluster={"gpus_per_worker": 0, "slurm": slurm})
    path = site.write("sft.yaml", config)
    done = site.slurmrl("doctor", str(path), "--job", "--scheduler", "local", "--json")
    checks = [one for one in json.loads(done.stdout)["checks"] if "container" in one["name"]]
    assert [one["state"] for one in checks] == ["ok"] * 4


@pytest.mark.parametrize(
    ("packed", "options", "token"),
    [(False, (), True), (True, ("--cleanenv", "--pid"), False)],
    ids=["folder", "packed"],
)
def test_killed_container_processes_are_restarted(
    tmp_path: Path, packed: bool, options: tuple[str, ...], token: bool
) -> None:
    """Kill a worker, which its fork server survives, and then the container's parent process."""
    site = start(tmp_path, *options, packed=packed)
    run = site.paths("sft/1").run
    (agent,) = processes(run)["agent"]
    workers = processes(run)["worker"]
    assert len({space(pid) for pid in (agent, *workers)}) == 2
    inside = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in workers]
    assert all(f"PYTHONPATH={run}/code".encode() in environ for environ in inside)
    assert all((b"MY_TOKEN=handed-on" in environ) == token for environ in inside)
    fork_servers = processes(run)["fork_server"]
    kill_one(run, "worker")
    wait_until("a new worker", lambda: len(set(processes(run)["worker"]) - set(workers)) == 2)
    assert processes(run)["fork_server"] == fork_servers
    workers = processes(run)["worker"]
    os.kill(apptainer.above(fork_servers[0], agent)[-1], 9)
    wait_until("a new worker", lambda: len(set(processes(run)["worker"]) - set(workers)) == 2)
    Hold(site).allow(NO_LIMIT)
    ended = site.wait_for_end("sft/1")
    assert (ended["state"], ended["step"], ended["incarnation"]) == ("COMPLETED", 8, 3)
    wait_until("all processes to leave", lambda: not any(processes(run).values()))


@pytest.mark.parametrize(
    "options", [pytest.param((), marks=pytest.mark.soak), ("--pid",)], ids=["", "own pids"]
)
def test_cancel_ends_containers(tmp_path: Path, options: tuple[str, ...]) -> None:
    site = start(tmp_path, *options, packed=False)
    run = site.paths("sft/1").run
    (agent,) = processes(run)["agent"]
    runtimes = {
        pid for child in processes(run)["fork_server"] for pid in apptainer.above(child, agent)
    }
    assert runtimes
    site.slurmrl("cancel", "sft/1")
    wait_until("all processes to leave", lambda: not any(processes(run).values()))
    wait_until("the containers", lambda: not any(Path(f"/proc/{pid}").exists() for pid in runtimes))
    assert site.status("sft/1")["state"] == "CANCELLED"
