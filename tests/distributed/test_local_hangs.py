"""Local trials in which one rank hangs: the report and the stacks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.rotation import HANGS, in_turn, rotating
from tests.support.trials import Site, ppo_config, processes, wait_until

REWARD = '''
import time

import torch
import torch.distributed as dist

from slurmrl.rewards.base import RewardFunction


class Hangs(RewardFunction):
    """Rank 1 does not come back; ``kind`` says why."""

    def __init__(self, *, kind):
        self.kind = kind

    def __call__(self, prompts, completions, rows):
        if dist.get_rank() == 1:
            getattr(self, self.kind)()
        return [0.0 for _ in completions]

    def spin(self):
        while True:
            pass

    def flood(self):
        for number in range(100_000):
            print(f"line {number:025d}", flush=number % 1000 == 0)
        self.sleep()

    def sleep(self):
        time.sleep(100_000)

    def skipped(self):
        dist.all_reduce(torch.ones(1))
'''
SLEEPS = "rank 1, which has been in reward_inf for"
EXPLAINED = {
    "spin": (f"in ref_inf (items of actor_gen) for {SLEEPS}", "in spin"),
    "skipped": ("in reward_inf (all_reduce #2): these are different operations", "in skipped"),
    "stop": ("rank 1, which has sent no heartbeat for", "it is stopped (SIGSTOP)"),
}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path)
    yield found
    for run in found.root.glob("*/*/*"):
        for chain in processes(run)["chain"]:
            os.kill(chain, signal.SIGKILL)  # its children end with it


def submit(site: Site, kind: str, **changes: Any) -> None:
    (site.folder / "hanging_reward.py").write_text(REWARD)
    setup = [f"export PYTHONPATH={site.folder}"]
    cluster = {"gpus_per_worker": 0, "silence_s": 20, "heartbeat_s": 0.5, "slurm": {"setup": setup}}
    config = ppo_config(
        evaluation=None,
        max_restarts_without_commit=1,
        reward={"name": "hanging_reward:Hangs", "options": {"kind": kind}},
        cluster=cluster,
        **changes,
    )
    path = site.write("config.json", config)
    site.slurmrl("submit", str(path), "--scheduler", "local", "--detach")


def waited_for(site: Site) -> dict[str, Any]:
    """Return the status of the trial when it shows that ranks wait for each other."""

    def look() -> dict[str, Any] | None:
        status = site.status("ppo/1")
        assert status["state"] in ("PENDING", "RUNNING"), status
        explained = (status["waiting"] or {}).get("explained") or ""
        return status if "(items of" in explained else None

    return wait_until("the ranks to wait", look)


@pytest.mark.parametrize("kind", rotating("spin", "skipped", first=1, shares=HANGS))
def test_hang_is_explained_before_it_is_ended(site: Site, kind: str) -> None:
    """The rank is killed at the deadline. The report names which ranks waited for which, and the
    stacks of all processes are kept.
    """
    submit(site, kind, step_timeout_s=30.0)
    assert site.wait_for_end("ppo/1")["state"] == "FAILED"
    check_end(site, kind)


def check_end(site: Site, kind: str) -> None:
    status = site.status("ppo/1")
    how = status["incarnations"][0]["how"]
    said, stack = EXPLAINED[kind]
    assert said in status["diagnosis"]
    assert "rank 0 has waited" in how
    assert said in how
    file = "logs/trainer/0.0.stacks-1.0.txt"
    assert f"stacks in {file}" in how
    parts = (site.paths("ppo/1").run / file).read_text().split("\n=== ")
    assert [part.partition(" ")[0] for part in parts[1:]] == ["rank", "rank", "the", "the"]
    assert "distributed_c10d.py" in parts[1]
    assert "all_gather #1 of group" in parts[1]
    assert stack in parts[2]
    assert " in _end\n" in parts[3]  # the master reports the end, or already waits for the stacks


@in_turn(3, HANGS)
def test_stacks_are_shown_on_demand_even_of_a_stopped_rank(site: Site) -> None:
    """`slurmrl stacks` shows hanging ranks of a running trial, and the status names which ranks
    wait.

    One rank has written 3 MB before, of which 1 MiB may stay. After it is stopped, its silence
    ends it long before the deadline.
    """
    submit(site, "flood", step_timeout_s=1000.0, logging={"output_mib": 1})
    status = waited_for(site)
    assert f"for {SLEEPS}" in status["waiting"]["explained"]
    assert [group["call"] for group in status["doing"]] == ["ref_inf", "reward_inf"]
    one = site.slurmrl("stacks", "ppo/1", "1").stdout
    assert "=== rank 1 on " in one
    assert "in sleep" in one
    assert "=== rank 0" not in one
    both = site.slurmrl("stacks", "ppo/1").stdout
    order = [both.index(f"=== {name}") for name in ("rank 0", "rank 1", "the master", "the agent")]
    assert order == sorted(order)
    assert "in take\n" in both[order[-1] :]  # the agent collects the stacks
    assert "=== the" not in one
    assert site.status("ppo/1")["incarnation"] == 1
    assert "no rank 2" in site.slurmrl("stacks", "ppo/1", "2", code=2).stderr
    folder = site.paths("ppo/1").logs / "trainer"
    wait_until("the output to be cut", (folder / "0.0.log.1").exists)
    assert sum(file.stat().st_size for file in folder.glob("0.0.log*")) < 1 << 20
    assert "of this output without its first" in (folder / "0.0.log.1").read_text()
    workers = processes(site.paths("ppo/1").run)["worker"]
    comms = {Path(f"/proc/{pid}/comm").read_text().strip(): pid for pid in workers}
    os.kill(comms["rank 1"], signal.SIGSTOP)
    assert site.wait_for_end("ppo/1")["state"] == "FAILED"
    check_end(site, "stop")
    assert "no ranks of ppo/1 are running" in site.slurmrl("stacks", "ppo/1", code=2).stderr
