"""A trial on a real Slurm whose completions are made by tasks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from slurmrl.run import events
from slurmrl.scheduler.submission import read_jobs
from tests.support.nodes import slurm, wait_for_empty_queue
from tests.support.rollout_trials import BATCH, STEPS, config_of, hurry, site_in, trained
from tests.support.rotation import TASK_CHANGES, in_turn
from tests.support.trials import Site, command_line, processes, wait_until

SLOW_REWARD = """
import time
from pathlib import Path

def different(prompts, completions, rows):
    if not Path({go!r}).exists():
        time.sleep(3)  # so that the trial does not end before it is paused
    return [float(len(set(completion))) for completion in completions]
"""


@pytest.mark.long
@in_turn(0, TASK_CHANGES)
def test_rollout_tasks_follow_the_requested_number(tmp_path: Path) -> None:
    """The requested number is one, two, zero, and one again. With zero tasks, the trainers wait.
    Then the trainers' job is cancelled, and `resume` replaces the remaining task.
    """
    site = site_in(tmp_path, {})
    go = tmp_path / "go"
    (tmp_path / "reward_of_mine.py").write_text(SLOW_REWARD.format(go=str(go)))
    config = config_of("scaled", {"max": 1, "max_staleness": 1})
    config["cluster"] = {
        "gpus_per_worker": 0, "interface": "lo", "heartbeat_s": 2, "lease_ttl_s": 20,
        "slurm": {"partition": "main", "time": "30"},
    }  # fmt: skip
    site.slurmrl("submit", str(site.write("grpo.yaml", config)), "--scheduler", "slurm")
    trial = "grpo/scaled"

    def wait_for(state: str, count: int) -> None:
        def told() -> bool:
            found = (one for one in events.read_all(site.paths(trial)) if "state" in one)
            return sum(one["state"] == state for one in found) >= count

        wait_until(f"{count} tasks that {state}", told)

    wait_for("joined", 1)
    site.slurmrl("scale", trial, "2")
    wait_for("joined", 2)
    site.slurmrl("scale", trial, "0")
    wait_for("left", 2)
    wait_until("trainers that wait", lambda: waits_for(site, trial) == "for a rollout task")
    assert site.status(trial)["state"] == "RUNNING"
    site.slurmrl("scale", trial, "1")
    wait_for("joined", 3)
    jobs = read_jobs(site.paths(trial), 1)
    assert jobs is not None
    slurm("scancel", *jobs["trainer"])
    wait_until("no trainers", lambda: site.status(trial)["state"] == "INTERRUPTED")
    assert f"rollout {jobs['rollout'][0]} (" in str(site.status(trial)["diagnosis"])
    go.touch()
    site.slurmrl("resume", trial)
    status = site.wait_for_end(trial)
    assert (status["state"], status["step"], status["incarnation"]) == ("COMPLETED", STEPS, 2)
    assert trained(site, trial) == STEPS * BATCH
    wait_for_empty_queue()


def waits_for(site: Site, trial: str) -> str:
    rollouts: dict[str, Any] = site.status(trial).get("rollouts") or {}
    return str(rollouts.get("waits_for", ""))


@pytest.mark.long
@in_turn(1, TASK_CHANGES)
def test_tasks_in_the_trainers_job_are_slurm_steps(tmp_path: Path) -> None:
    """Each of two hosts has a rank and a task. A task's agent is killed, then the job. The next
    link starts new tasks.
    """
    site = site_in(tmp_path, {}, pause_s=0.6)
    options = {"partition": "main", "time": "30", "links": 2}
    config = config_of("inside", {"max_staleness": 1})
    config["rollout"]["gpus"] = "2-3"
    config["cluster"] = {
        "gpus_per_worker": 0, "workers_per_host": 2, "interface": "lo", "slurm": options,
    }  # fmt: skip
    site.slurmrl("submit", str(site.write("grpo.yaml", config)), "--scheduler", "slurm")
    trial = "grpo/inside"
    paths = site.paths(trial)
    site.wait_for_step(trial, 2)
    os.kill(
        next(pid for pid in processes(paths.run)["agent"] if "rollout" in command_line(pid)),
        signal.SIGKILL,
    )

    def starts() -> list[dict[str, Any]]:
        return [one for one in events.read_all(paths) if one["kind"] == "task_started"]

    wait_until("the task to be started again", lambda: len(starts()) == 3)
    site.wait_for_step(trial, 6)
    jobs = read_jobs(paths, 1)
    assert jobs is not None
    assert set(jobs) == {"trainer"}
    slurm("scancel", f"{jobs['trainer'][0]}_0")
    hurry(site)
    status = site.wait_for_end(trial)
    assert (status["state"], status["step"], status["incarnation"]) == ("COMPLETED", STEPS, 2)
    assert trained(site, trial) == STEPS * BATCH
    assert sorted(one["task"] for one in starts()[:2]) == [0, 1]
    assert starts()[0]["host"] != starts()[1]["host"]
    assert [one["failures"] for one in starts()] == [0, 0, 1, 0, 0]
    wait_for_empty_queue()
