"""The Slurm scheduler on a real Slurm: the common contract, and Slurm's own features."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from slurmrl.errors import SchedulerError
from slurmrl.scheduler import choose
from slurmrl.scheduler.base import JobIds, JobState
from slurmrl.scheduler.slurm import SlurmScheduler
from tests.scheduler_contract import (
    STAY,
    Ask,
    active,
    pids,
    request_of,
    state,
    submitted,
    test_batch_scripts_are_private,
    test_cancel_ends_running_and_pending_jobs,
    test_cancel_keeps_the_named_element,
    test_ids_are_recovered_even_if_they_were_never_written,
    test_interrupt_warns_the_running_job_and_ends_the_chain,
    test_job_gets_a_clean_environment,
    test_jobs_of_a_chain_run_in_turn_and_keep_their_output,
    test_kill_ends_a_process_that_ignores_signals,
    test_next_job_follows_a_killed_job,
    test_running_and_pending_jobs_are_named_by_element,
    wait_until,
)

__all__ = [
    "test_batch_scripts_are_private",
    "test_cancel_ends_running_and_pending_jobs",
    "test_cancel_keeps_the_named_element",
    "test_ids_are_recovered_even_if_they_were_never_written",
    "test_interrupt_warns_the_running_job_and_ends_the_chain",
    "test_job_gets_a_clean_environment",
    "test_jobs_of_a_chain_run_in_turn_and_keep_their_output",
    "test_kill_ends_a_process_that_ignores_signals",
    "test_next_job_follows_a_killed_job",
    "test_running_and_pending_jobs_are_named_by_element",
]

EVERY_TASK = """
import os, subprocess
show = 'echo $SLURM_NODEID $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $MADE_HERE'
subprocess.run(['srun', 'bash', '-c', show], check=True)
"""


@pytest.fixture
def scheduler() -> SlurmScheduler:
    return SlurmScheduler()


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    def make(code: str, **more: object) -> object:
        return request_of(tmp_path / "run", code, **more)  # type: ignore[arg-type]

    return make  # type: ignore[return-value]


def test_auto_scheduler_is_slurm_on_a_cluster(scheduler: SlurmScheduler) -> None:
    scheduler.check()
    assert choose("auto", asks_slurm=False) == "slurm"


def test_job_gets_its_hosts_and_gpus(scheduler: SlurmScheduler, ask: Ask) -> None:
    options = {"slurm": {"setup": ["export MADE_HERE=yes"]}}
    shape = {"hosts": 2, "workers_per_host": 2, "gpus_per_worker": 1, "cpus_per_worker": 2}
    request = ask(EVERY_TASK, links=1, options=options, **shape)
    with submitted(scheduler, request) as jobs:
        wait_until(lambda: not active(scheduler, jobs), "the job ends")
        (task,) = scheduler.query(jobs)
        log = request.run.batch_log("trainer", f"slurm-{task.job_id}")
        assert task.state is JobState.COMPLETED, log.read_text()
        lines = sorted(line.split() for line in log.read_text().splitlines())
        assert [line[0] for line in lines] == ["0", "1"]
        assert tuple(line[1] for line in lines) == task.hosts
        assert [(len(line[2].split(",")), line[3]) for line in lines] == [(2, "yes")] * 2


NAMES = (
    *("with space", "it's", 'a "quote"', "100% #1", "Größe"),
    *("$HOME `id` ; &", "a,b=[0-3] 'ß' %A\"é"),
)


def completed(scheduler: SlurmScheduler, jobs: JobIds) -> bool:
    return state(scheduler, jobs, 0) is JobState.COMPLETED


def test_run_directory_with_any_name_survives_the_batch_script(
    scheduler: SlurmScheduler, tmp_path: Path
) -> None:
    with ExitStack() as all_jobs:
        found = []
        for name in NAMES:
            request = request_of(tmp_path / name, "import os; print(os.getcwd())", links=1)
            found.append((request, all_jobs.enter_context(submitted(scheduler, request))))
        for request, jobs in found:
            wait_until(
                partial(completed, scheduler, jobs), f"the link in {request.run.run} completes"
            )
            log = request.run.batch_log("trainer", f"slurm-{jobs['trainer'][0]}_0")
            assert log.read_text() == f"{request.run.run}\n"


def test_pending_job_reports_its_reason(scheduler: SlurmScheduler, ask: Ask) -> None:
    request = ask("pass", options={"slurm": {"extra_lines": ["--begin=now+1hour"]}})
    with submitted(scheduler, request) as jobs:
        wait_until(
            lambda: {task.reason for task in scheduler.query(jobs)} == {"BeginTime"}, "a reason"
        )
        assert [task.state for task in scheduler.query(jobs)] == [JobState.PENDING] * 2


def test_requeued_job_keeps_its_name_and_output(scheduler: SlurmScheduler, ask: Ask) -> None:
    request = ask("print('started', flush=True)\n" + STAY, links=1)
    with submitted(scheduler, request) as jobs:
        wait_until(lambda: len(pids(request)) == 1, "link 0 has started")
        (before,) = scheduler.query(jobs)
        subprocess.run(["scontrol", "requeue", before.job_id], check=True)
        wait_until(lambda: len(pids(request)) == 2, "it starts again")
        (after,) = scheduler.query(jobs)
        assert (after.job_id, after.state) == (before.job_id, JobState.RUNNING)
        log = request.run.batch_log("trainer", f"slurm-{after.job_id}")
        assert log.read_text().count("started") == 2


def test_nonexistent_jobs_are_unknown(scheduler: SlurmScheduler, ask: Ask) -> None:
    (task,) = scheduler.query({"trainer": ("999999",)})
    assert task.state is JobState.UNKNOWN
    with submitted(scheduler, ask("pass", links=1)) as jobs:
        both = scheduler.query({**jobs, "rollout": ("999999",)})
        assert [task.group for task in both] == ["trainer", "rollout"]
        assert both[1].state is JobState.UNKNOWN


def test_rejected_job_leaves_no_other_jobs(scheduler: SlurmScheduler, ask: Ask) -> None:
    request = ask("pass", options={"slurm": {"partition": "no such one"}})
    with pytest.raises(SchedulerError, match="invalid partition"):
        scheduler.submit(request)
    assert scheduler.recover(request.run, 1) == {}
