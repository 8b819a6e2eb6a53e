"""The local scheduler: the common contract, and its own features."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from pathlib import Path

import pytest

import slurmrl
from slurmrl.errors import CorruptFileError, SchedulerError
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import end
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import JobState
from slurmrl.scheduler.local_chain import ChainState, LocalScheduler, chain_process
from slurmrl.scheduler.submission import ProcessId, set_wanted_tasks
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
    wait_running,
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


@pytest.fixture
def scheduler() -> LocalScheduler:
    return LocalScheduler()


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    def make(code: str, **more: object) -> object:
        return request_of(tmp_path / "it's a run", code, **more)  # type: ignore[arg-type]

    return make  # type: ignore[return-value]


def test_no_job_follows_if_the_history_was_removed(scheduler: LocalScheduler, ask: Ask) -> None:
    request = ask(STAY, links=2)
    request.run.config.touch()
    with submitted(scheduler, request) as jobs:
        wait_until(lambda: pids(request), "link 0 has started")
        shutil.rmtree(request.run.history)
        os.kill(pids(request)[0], signal.SIGKILL)
        wait_until(lambda: not active(scheduler, jobs), "the chain ends")
        states = [task.state for task in scheduler.query(jobs)]
        assert states == [JobState.FAILED, JobState.CANCELLED]
    output = request.run.batch_log("trainer", f"chain.{request.number}").read_text()
    assert "no other link starts" in output
    assert "Traceback" not in output


def test_no_job_follows_the_end_of_the_trial(scheduler: LocalScheduler, ask: Ask) -> None:
    request = ask(STAY, links=3)
    with submitted(scheduler, request) as jobs:
        wait_until(lambda: pids(request), "link 0 has started")
        end(History(request.run.history), Kind.CANCELLED, {})
        os.kill(pids(request)[0], signal.SIGKILL)
        wait_until(lambda: not active(scheduler, jobs), "the chain ends")
        assert [task.state for task in scheduler.query(jobs)] == [
            JobState.FAILED,
            JobState.CANCELLED,
            JobState.CANCELLED,
        ]
        assert len(pids(request)) == 1


def test_jobs_die_with_their_chain(scheduler: LocalScheduler, ask: Ask) -> None:
    request = ask(STAY)
    with submitted(scheduler, request) as jobs:
        wait_until(lambda: pids(request), "link 0 has started")
        wait_running(scheduler, jobs, 0)
        chain_process(jobs["trainer"][0]).send(signal.SIGKILL)
        wait_until(lambda: ProcessId.of(pids(request)[0]) is None, "the link ends")
        wait_until(lambda: not active(scheduler, jobs), "the chain is seen to have ended")
        tasks = scheduler.query(jobs)
        assert [task.state for task in tasks] == [JobState.FAILED, JobState.CANCELLED]
        assert "killed" in tasks[0].reason


def test_leftover_processes_of_a_job_are_killed(scheduler: LocalScheduler, ask: Ask) -> None:
    code = "import subprocess; child = subprocess.Popen(['sleep', '600'])\n"
    code += "open('pid', 'a').write(f'{child.pid}\\n')"
    request = ask(code, links=1)
    with submitted(scheduler, request) as jobs:
        wait_until(lambda: state(scheduler, jobs, 0) is JobState.COMPLETED, "the link completes")
        wait_until(lambda: ProcessId.of(pids(request)[0]) is None, "its child ends")


@pytest.mark.long
def test_cancel_kills_a_job_that_ignores_sigterm(scheduler: LocalScheduler, ask: Ask) -> None:
    request = ask("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STAY)
    with submitted(scheduler, request) as jobs:
        wait_until(lambda: pids(request), "link 0 has started")
        scheduler.cancel(jobs)
        wait_until(lambda: not active(scheduler, jobs), "it is killed after its grace")
        assert [task.state for task in scheduler.query(jobs)] == [JobState.CANCELLED] * 2


def test_running_chain_is_found_by_its_id_from_another_process(
    scheduler: LocalScheduler, ask: Ask
) -> None:
    with submitted(scheduler, ask(STAY)) as jobs:
        wait_running(scheduler, jobs, 0)
        assert LocalScheduler().query(jobs) == scheduler.query(jobs)


def test_each_group_has_its_own_chain(scheduler: LocalScheduler, ask: Ask) -> None:
    request = ask("print('done')", links=1)
    other = dataclasses.replace(request.groups[0], name="rollout")
    request = dataclasses.replace(request, groups=(*request.groups, other))
    with submitted(scheduler, request) as jobs:
        assert set(jobs) == {"trainer", "rollout"}
        wait_until(lambda: not active(scheduler, jobs), "both end")
        assert [task.group for task in scheduler.query(jobs)] == ["trainer", "rollout"]


def test_trainers_do_not_start_if_the_submitter_is_killed_before(
    scheduler: LocalScheduler, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers without tasks would wait forever and look alive."""
    request = ask("print('done')", links=1)
    other = dataclasses.replace(request.groups[0], name="rollout")
    request = dataclasses.replace(request, groups=(*request.groups, other))
    started: list[str] = []
    monkeypatch.setattr(scheduler, "_start", lambda asked, group: started.append(group.name))
    scheduler.submit(request)
    assert started == ["rollout", "trainer"]


def test_number_of_running_tasks_follows_the_request(scheduler: LocalScheduler, ask: Ask) -> None:
    """The number is first zero, then two, while the trainers run.

    The chain of tasks ends with the trainers' chain.
    """
    request = ask(STAY, links=1)
    tasks = dataclasses.replace(request.groups[0], name="rollout", links=4, hosts=3, elastic=True)
    request = dataclasses.replace(request, groups=(*request.groups, tasks))
    request.run.code.joinpath("slurmrl").symlink_to(Path(slurmrl.__file__).parent)
    set_wanted_tasks(request.run, "rollout", 0, 3)
    with submitted(scheduler, request) as jobs:
        wait_until(lambda: pids(request), "the trainers run")
        set_wanted_tasks(request.run, "rollout", 2, 3)
        wait_until(lambda: len(pids(request)) == 3, "two tasks run")
        set_wanted_tasks(request.run, "rollout", 0, 3)
        for pid in pids(request):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not active(scheduler, jobs), "none follows, and the chains end")
        assert len(pids(request)) == 3


def test_chain_without_traces_is_unknown(scheduler: LocalScheduler) -> None:
    (task,) = scheduler.query({"trainer": (f"local-{os.getpid()}-1",)})
    assert task.state is JobState.UNKNOWN


def test_chain_on_another_machine_is_alive_but_cannot_be_signaled(
    scheduler: LocalScheduler, tmp_path: Path
) -> None:
    run = RunPaths(tmp_path)
    job = f"local-{os.getpid()}-1"
    run.submission(1).mkdir(parents=True)
    identity = ProcessId(os.getpid(), 1)
    there = dataclasses.replace(ChainState.of(identity, 1), host="elsewhere", boot="other")
    there.elements[0].state = JobState.RUNNING
    there.write(run.local_chain(1, "trainer"))
    run.submission_jobs(1).write_text(f'{{"trainer": "{job}"}}')
    jobs = scheduler.recover(run, 1)
    (task,) = scheduler.query(jobs)
    assert (task.state, task.hosts) == (JobState.RUNNING, ("elsewhere",))
    with pytest.raises(SchedulerError, match="runs on elsewhere"):
        scheduler.cancel(jobs)


def test_chains_are_ended_after_a_reboot(scheduler: LocalScheduler, tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    run.submission(1).mkdir(parents=True)
    identity = ProcessId(os.getpid(), 1)
    before = dataclasses.replace(ChainState.of(identity, 2), boot="the one before")
    before.elements[0].state = JobState.RUNNING
    before.write(run.local_chain(1, "trainer"))
    run.submission_jobs(1).write_text(f'{{"trainer": "{before.job}"}}')
    tasks = scheduler.query(scheduler.recover(run, 1))
    assert [task.state for task in tasks] == [JobState.FAILED, JobState.CANCELLED]


def test_more_than_one_host_is_rejected(scheduler: LocalScheduler, ask: Ask) -> None:
    with pytest.raises(SchedulerError, match="requests 2 hosts"):
        scheduler.submit(ask("pass", hosts=2))


def test_slurm_job_id_is_rejected() -> None:
    with pytest.raises(CorruptFileError, match="'41' is not"):
        chain_process("41")
