"""Tests with slurmdbd: sacct's answers about jobs that left the queue, and limits on the number of
a user's jobs.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmrl.env import user_name
from slurmrl.errors import SchedulerError
from slurmrl.scheduler.base import JobIds, JobState, TaskState
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.slurm import SlurmScheduler
from slurmrl.scheduler.states import QueueRow
from tests.scheduler_contract import STAY, active, pids, request_of, submitted, wait_until
from tests.support.beds import bed

pytestmark = pytest.mark.long


class Forgetful(SlurmClient):
    """Make Slurm forget all jobs, as if MinJobAge had passed since they ended."""

    def queue(self, jobs: Iterable[str]) -> list[QueueRow]:
        return []


class Blind(SlurmClient):
    """A user without permission to see limits."""

    def submit_limits(self, user: str) -> str:
        raise SchedulerError("Access/permission denied")


@pytest.fixture(scope="module")
def accounting_bed() -> Iterator[Path]:
    with bed("--accounting", "--nodes", "4", "--gpus", "1", needs=("not installed",)) as directory:
        yield directory


@pytest.fixture(autouse=True)
def _use(accounting_bed: Path, _slurm_conf: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(accounting_bed / "slurm.conf"))


def remembered(jobs: JobIds) -> list[TaskState]:
    return SlurmScheduler(Forgetful()).query(jobs)


def wait_remembered(jobs: JobIds, *expected: str) -> list[TaskState]:
    """Rows may reach the database two seconds late."""
    wait_until(
        lambda: [task.raw.partition(" ")[0] for task in remembered(jobs)] == list(expected),
        f"sacct to say {expected}",
    )
    return remembered(jobs)


def test_ends_of_jobs_missing_in_the_queue_come_from_accounting(tmp_path: Path) -> None:
    scheduler = SlurmScheduler()
    code = "import os, sys; sys.exit(3 * int(os.environ['SLURM_ARRAY_TASK_ID'] == '1'))"
    with submitted(scheduler, request_of(tmp_path, code, links=2)) as jobs:
        wait_until(lambda: not active(scheduler, jobs), "both links end")
        done, failed = wait_remembered(jobs, "COMPLETED", "FAILED")
        assert (done.state, done.exit_code) == (JobState.COMPLETED, 0)
        assert (failed.state, failed.exit_code) == (JobState.FAILED, 3)
        assert failed.words == "ended with exit code 3"
        assert len(failed.hosts) == 1


def test_accounting_distinguishes_cancelled_preempted_and_lost_jobs(tmp_path: Path) -> None:
    scheduler = SlurmScheduler()

    def one(name: str, **slurm: Any) -> Any:
        options = {"slurm": {"continue": "none", "extra_lines": ["--exclusive"], **slurm}}
        return request_of(tmp_path / name, STAY, links=1, options=options)

    low, lost, other = one("low", partition="low", nodelist="n0"), one("lost", nodelist="n1"), None
    with submitted(scheduler, low) as first, submitted(scheduler, lost) as second:
        wait_until(lambda: pids(low) and pids(lost), "both run")
        other = one("high", partition="high", nodelist="n0")
        with submitted(scheduler, other):
            subprocess.run(
                ["scontrol", "update", "nodename=n1", "state=down", "reason=test"], check=True
            )
            (task,) = wait_remembered(first, "PREEMPTED")
            assert task.state is JobState.PREEMPTED
            (task,) = wait_remembered(second, "NODE_FAIL")
            assert (task.state, task.words) == (JobState.NODE_FAIL, "a host failed")
    subprocess.run(["scontrol", "update", "nodename=n1", "state=resume"], check=True)
    with submitted(scheduler, request_of(tmp_path / "c", STAY, links=3)) as jobs:
        wait_until(lambda: pids(request_of(tmp_path / "c", STAY)), "link 0 runs")
        scheduler.cancel(jobs)
        wait_until(lambda: not active(scheduler, jobs), "the links end")
        # Whether Slurm names the elements that never ran depends on when it recorded them.
        wait_until(
            lambda: {task.state for task in remembered(jobs)} == {JobState.CANCELLED}, "sacct"
        )
        assert remembered(jobs)[0].element == 0


@pytest.mark.parametrize(("client", "links"), [(SlurmClient(), 3), (Blind(), 2)])
def test_chain_length_respects_the_users_job_limit(
    tmp_path: Path, client: SlurmClient, links: int, caplog: pytest.LogCaptureFixture
) -> None:
    """slurmrl reads a limit before submission if it can be queried. Otherwise it halves the chain
    until Slurm accepts it.
    """
    who = ("where", f"name={user_name()}", "account=poor")
    subprocess.run(["sacctmgr", "-i", "modify", "user", *who, "set", "maxsubmitjobs=3"], check=True)
    scheduler = SlurmScheduler(client)
    request = request_of(tmp_path, STAY, links=8, options={"slurm": {"account": "poor"}})
    with submitted(scheduler, request) as jobs:
        assert len(scheduler.query(jobs)) == links
        assert f"accepts only {links} of the" in caplog.text
