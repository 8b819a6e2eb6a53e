"""Files of a running trial with rollout tasks are replaced by other kinds of files."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmrl.run.history.slots import History
from slurmrl.run.history.state import fold
from tests.support.replaced import replace
from tests.support.rollout_trials import config_of, site_in
from tests.support.trials import processes, wait_until

COMMITS = 3
"""Commits after a disturbance that show that the trial goes on."""


def newest_of_each_task(run: Path, pattern: str) -> list[Path]:
    """Return the newest file of each task's newest attempt."""
    newest: dict[str, tuple[int, Path]] = {}
    for folder in (run / "rollouts").iterdir():
        task, _, attempt = folder.name.rpartition(".")
        if int(attempt) >= newest.get(task, (-1, folder))[0]:
            newest[task] = int(attempt), folder
    found = (sorted(folder.glob(pattern)) for _, folder in newest.values())
    return [paths[-1] for paths in found if paths]


def last(run: Path, pattern: str) -> list[Path]:
    return [max(run.glob(pattern), key=lambda path: path.lstat().st_mtime)]


FILES: dict[str, Callable[[Path], list[Path]]] = {
    "results": lambda run: newest_of_each_task(run, "results"),
    "requests": lambda run: newest_of_each_task(run, "*.requests"),
    "log of the agent": lambda run: last(run, "control/*.trainer.0"),
    "lease of the agent": lambda run: last(run, "leases/trainer.0.0"),
    "leases of tasks": lambda run: [*run.glob("leases/rollout.*")],
}


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["folder", "fifo", "link"])
def test_trial_continues_if_its_files_are_replaced(tmp_path: Path, kind: str) -> None:
    site = site_in(tmp_path, {})
    limits = {"total_steps": 1_000_000, "step_timeout_s": 60, "max_restarts_without_commit": 4}
    config = config_of("1", {"max": 2, "max_staleness": 1}) | limits
    config["cluster"] |= {"heartbeat_s": 1, "lease_ttl_s": 8, "silence_s": 20}
    site.slurmrl("submit", str(site.write("c.yaml", config)), "--scheduler", "local", "--detach")
    paths = site.paths("grpo/1")
    history = History(paths.history)

    def step() -> int:
        return max((one.step for one in fold(history.read()).commits), default=0)

    try:
        wait_until("the first commit", step)
        for name, find in FILES.items():
            before = step()
            for path in find(paths.run):
                replace(path, kind)
            steps = 2 * COMMITS
            wait_until(f"commits after {name}", lambda wanted=before + steps: step() >= wanted)
        assert site.status("grpo/1")["state"] == "RUNNING"
    finally:
        for pid in processes(paths.run)["chain"]:
            os.kill(pid, signal.SIGKILL)
