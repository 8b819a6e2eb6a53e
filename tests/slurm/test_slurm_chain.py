"""Tests of a chain on a real Slurm: several arrays of one group, requeues, elastic groups."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmrl.errors import UsageError
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import begin
from slurmrl.scheduler import extensions
from slurmrl.scheduler.base import JobState, SubmissionRequest
from slurmrl.scheduler.chain import Link, TopUp, continue_after, end_chain, top_up
from slurmrl.scheduler.slurm import HELD, Change, ElasticGroup, SlurmScheduler
from tests.scheduler_contract import (
    STAY,
    active,
    pids,
    request_of,
    state,
    submitted,
    wait_until,
)

STAY_OR_GO = """
import os, pathlib, time
open("pid", "a").write(f"{os.getpid()}\\n")
open("links", "a").write(os.environ["SLURM_ARRAY_TASK_ID"] + "\\n")
while not pathlib.Path("go").exists():
    time.sleep(0.05)
"""


@pytest.fixture
def scheduler() -> SlurmScheduler:
    return SlurmScheduler()


def chain(folder: Path, code: str, links: int, **more: Any) -> SubmissionRequest:
    request = request_of(folder / "run", code, links=links, **more)
    request.run.submission(1).mkdir(parents=True)
    request.run.submission_request(1).write_text("{}")
    return request


@contextmanager
def everything_gone(scheduler: SlurmScheduler, request: SubmissionRequest) -> Iterator[None]:
    """Cancel all extensions of a submission afterwards."""
    with submitted(scheduler, request):
        try:
            yield
        finally:
            scheduler.kill(scheduler.recover(request.run, 1))
            wait_until(
                lambda: not active(scheduler, scheduler.recover(request.run, 1)), "the jobs end"
            )


def commit(request: SubmissionRequest) -> None:
    writer = begin(History(request.run.history), {"submission": 1, "job": "x"})
    writer.append(Kind.COMMIT, {"step": 1, "directory": "step-00000001.1"})


def running_link(scheduler: SlurmScheduler, request: SubmissionRequest) -> Link:
    jobs = scheduler.recover(request.run, 1)
    found = [task for task in scheduler.query(jobs) if task.state is JobState.RUNNING]
    job, _, index = found[0].job_id.partition("_")
    return Link(request.run, 1, "trainer", job, int(index))


def running(scheduler: SlurmScheduler, request: SubmissionRequest) -> int:
    tasks = scheduler.query(scheduler.recover(request.run, 1))
    return len([task for task in tasks if task.state is JobState.RUNNING])


def test_chain_that_commits_gets_more_jobs(scheduler: SlurmScheduler, tmp_path: Path) -> None:
    request = chain(tmp_path, STAY_OR_GO, 2)
    with everything_gone(scheduler, request):
        wait_until(lambda: pids(request), "link 0 runs")
        link = running_link(scheduler, request)
        assert top_up(link, scheduler, by=link.element) is TopUp.NO_COMMIT
        commit(request)
        job = top_up(link, scheduler, by=link.element)
        assert isinstance(job, str)
        assert top_up(link, scheduler, by=link.element) is TopUp.ENOUGH
        jobs = SlurmScheduler().recover(request.run, 1)
        assert jobs == {"trainer": (link.job, job)}
        tasks = scheduler.query(jobs)
        assert [task.element for task in tasks] == [0, 1, 2, 3]
        assert [task.job_id for task in tasks][-2:] == [f"{job}_2", f"{job}_3"]
        assert continue_after(link, scheduler) == f"{link.job}_1 follows, 3 left"
        (request.run.run / "go").touch()
        wait_until(lambda: not active(scheduler, jobs), "all links end")
        assert (request.run.run / "links").read_text().split() == ["0", "1", "2", "3"]


def test_ended_trial_cancels_all_its_arrays(scheduler: SlurmScheduler, tmp_path: Path) -> None:
    request = chain(tmp_path, STAY, 2)
    with everything_gone(scheduler, request):
        wait_until(lambda: pids(request), "link 0 runs")
        link = running_link(scheduler, request)
        scheduler.extend(request.run, 1, "trainer", by="somebody")
        end_chain(link, scheduler)
        jobs = scheduler.recover(request.run, 1)
        wait_until(
            lambda: [task.element for task in active(scheduler, jobs)] == [0], "one link is left"
        )


def test_unrecorded_job_is_found_and_not_submitted_twice(
    scheduler: SlurmScheduler, tmp_path: Path
) -> None:
    request = chain(tmp_path, STAY, 2)
    with everything_gone(scheduler, request):
        wait_until(lambda: pids(request), "link 0 runs")
        job = scheduler.extend(request.run, 1, "trainer", by="41_0")
        request.run.extension_job(1, "trainer", 1).unlink()
        assert SlurmScheduler().recover(request.run, 1)["trainer"][1:] == (job,)
        assert scheduler.extend(request.run, 1, "trainer", by="41_0") == job
        assert request.run.extension_job(1, "trainer", 1).exists()
        assert len(extensions.read(request.run, 1, "trainer")) == 1


def test_claim_without_a_job_is_skipped(scheduler: SlurmScheduler, tmp_path: Path) -> None:
    request = chain(tmp_path, STAY, 2)
    with everything_gone(scheduler, request):
        wait_until(lambda: pids(request), "link 0 runs")
        void = extensions.Claim(index=1, first=2, count=2, by="me", records=0)
        assert extensions.take(request.run, 1, "trainer", void)
        job = scheduler.extend(request.run, 1, "trainer", by="me")
        assert [one.job for one in extensions.read(request.run, 1, "trainer")] == [None, job]
        jobs = scheduler.recover(request.run, 1)
        assert [task.element for task in scheduler.query(jobs)] == [0, 1, 4, 5]


def test_one_of_two_concurrent_extensions_wins(scheduler: SlurmScheduler, tmp_path: Path) -> None:
    request = chain(tmp_path, STAY, 2)
    with everything_gone(scheduler, request):
        wait_until(lambda: pids(request), "link 0 runs")
        claimed = extensions.take

        def slower(*arguments: Any) -> bool:
            theirs = extensions.Claim(index=1, first=2, count=2, by="x", records=0)
            assert claimed(request.run, 1, "trainer", theirs)
            return claimed(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(extensions, "take", slower)
            with pytest.raises(UsageError, match="another process is extending"):
                scheduler.extend(request.run, 1, "trainer", by="me")


def test_job_requeues_itself(scheduler: SlurmScheduler, tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from slurmrl import env\n"
        "from slurmrl.run.paths import RunPaths\n"
        "from slurmrl.run.history.slots import History\n"
        "from slurmrl.run.history.state import begin\n"
        "from slurmrl.scheduler.chain import Link, continue_after\n"
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"  # like a supervisor
        "link = Link.here(RunPaths(Path.cwd()), 1, 'trainer')\n"
        "job = f'{env.JOB_ID.get()}.{env.RESTART_COUNT.get()}.0'\n"
        "if link.restart < 1: begin(History(link.run.history), {'submission': 1, 'job': job})\n"
        "print(link.restart, continue_after(link), flush=True)\n"
    )
    request = chain(tmp_path, code, 1, options={"slurm": {"continue": "requeue"}})
    request.run.submission_request(1).write_text(json.dumps({"continue": "requeue"}))
    request.run.code.joinpath("slurmrl").symlink_to(Path(extensions.__file__).parents[1])
    with everything_gone(scheduler, request):
        jobs = scheduler.recover(request.run, 1)
        wait_until(lambda: not active(scheduler, jobs), "the second start ends")
        element = f"{jobs['trainer'][0]}_0"
        log = request.run.batch_log("trainer", f"slurm-{element}").read_text().splitlines()
        assert [line for line in log if line[:1].isdigit()] == [
            f"0 {element} was requeued",
            "1 no incarnation began in this job, so it is not requeued",
        ]
        (task,) = scheduler.query(jobs)
        assert (task.state, task.restarts) == (JobState.COMPLETED, 1)


def test_cancelled_chain_gets_no_more_jobs(scheduler: SlurmScheduler, tmp_path: Path) -> None:
    """The link commits when it gets the warning signal, as a trial does."""
    code = (
        "from pathlib import Path; from slurmrl.run.paths import RunPaths\n"
        "from slurmrl.run.history.slots import History, Kind\n"
        "from slurmrl.run.history.state import begin\n"
        "from slurmrl.scheduler.chain import Link, continue_after\n"
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "link = Link.here(RunPaths(Path.cwd()), 1, 'trainer')\n"
        "writer = begin(History(link.run.history), {'submission': 1, 'job': 'x'})\n"
        "Path('pid').write_text('0'); signal.sigwait([signal.SIGTERM])\n"
        "writer.append(Kind.COMMIT, {'step': 1, 'directory': 'step-00000001.1'})\n"
        "Path('after').write_text(continue_after(link))\n"
    )
    request = chain(tmp_path, code, 3)
    request.run.code.joinpath("slurmrl").symlink_to(Path(extensions.__file__).parents[1])
    with everything_gone(scheduler, request):
        wait_until(lambda: pids(request), "link 0 runs")
        jobs = scheduler.recover(request.run, 1)
        subprocess.run(["scancel", *jobs["trainer"]], check=True)
        wait_until((request.run.run / "after").exists, "the link says what follows")
        wait_until(lambda: not active(scheduler, jobs), "all links end")
        assert "no link is left" in (request.run.run / "after").read_text()
        assert scheduler.recover(request.run, 1) == jobs


def test_job_with_continue_none_is_not_requeued_by_slurm(
    scheduler: SlurmScheduler, tmp_path: Path
) -> None:
    request = chain(tmp_path, STAY, 1, options={"slurm": {"continue": "none"}})
    with everything_gone(scheduler, request):
        wait_until(lambda: pids(request), "the job runs")
        link = running_link(scheduler, request)
        done = subprocess.run(["scontrol", "requeue", link.element], capture_output=True)
        assert done.returncode != 0


def test_exit_code_and_remaining_time_of_an_element_are_reported(
    scheduler: SlurmScheduler, tmp_path: Path
) -> None:
    request = chain(tmp_path, "import sys; sys.exit(3)", 1)
    with submitted(scheduler, request) as jobs:
        wait_until(lambda: state(scheduler, jobs, 0) is JobState.FAILED, "the link fails")
        (task,) = scheduler.query(jobs)
        assert (task.exit_code, task.signal) == (3, None)
        assert task.words == "ended with exit code 3"
    request = chain(tmp_path / "other", STAY, 1, options={"slurm": {"time": "10"}})
    with submitted(scheduler, request) as jobs:
        wait_until(lambda: pids(request), "the link runs")
        (task,) = scheduler.query(jobs)
        assert task.time_left_s is not None
        assert 0 < task.time_left_s <= 600
        assert task.start
        os.kill(pids(request)[0], signal.SIGKILL)
        wait_until(lambda: state(scheduler, jobs, 0) is JobState.FAILED, "the link is killed")
        (task,) = scheduler.query(jobs)
        assert (task.signal, task.words) == (9, "was ended by signal 9 (SIGKILL)")


@pytest.mark.parametrize("elements", [5, 3])
def test_lost_task_of_an_elastic_group_is_replaced(
    scheduler: SlurmScheduler, tmp_path: Path, elements: int
) -> None:
    """A queued spare task replaces it, or a task that the trainers' link submits."""
    request = chain(tmp_path, STAY, elements, hosts=3, elastic=True)
    group = ElasticGroup(request.run, 1, "trainer", by="me")
    with everything_gone(scheduler, request):
        wait_until(lambda: len(pids(request)) == 3, "three tasks run")
        assert group.keep(3).submit == 0
        os.kill(pids(request)[1], signal.SIGKILL)
        wait_until(lambda: group.keep(3) and len(pids(request)) == 4, "its place is taken")
        jobs = scheduler.recover(request.run, 1)
        assert len(jobs["trainer"]) == (1 if elements == 5 else 2)
        left = 4 if elements == 5 else 3
        wait_until(lambda: len(active(scheduler, jobs)) == left, "the lost one has left")
        assert running(scheduler, request) == 3


def test_trainers_job_maintains_an_elastic_group(scheduler: SlurmScheduler, tmp_path: Path) -> None:
    """A running link maintains the group from its compute node. The end of the trial cancels the
    group.
    """
    code = (
        "import time; from pathlib import Path; from slurmrl.run.paths import RunPaths\n"
        "from slurmrl.scheduler import chain; from slurmrl.scheduler.chain import *\n"
        "chain.KEEP_S = 0.5\n"
        "link = Link.here(RunPaths(Path.cwd()), 1, 'trainer')\n"
        "looks = chain.Upkeep(link, {'rollout': 2}, print); looks.start()\n"
        "while not Path('go').exists(): time.sleep(0.05)\n"
        "looks.stop(); end_chain(link)\n"
    )
    request = chain(tmp_path, code, 1)
    (rollout,) = request_of(tmp_path / "run", STAY, links=2, hosts=2, elastic=True).groups
    groups = (*request.groups, replace(rollout, name="rollout"))
    request = replace(request, groups=groups)
    request.run.code.joinpath("slurmrl").symlink_to(Path(extensions.__file__).parents[1])
    with everything_gone(scheduler, request):
        wait_until(lambda: len(pids(request)) == 2, "two tasks run")
        os.kill(pids(request)[0], signal.SIGKILL)
        wait_until(lambda: len(pids(request)) == 3, "a third takes the place of the lost one")
        jobs = scheduler.recover(request.run, 1)
        assert (len(jobs["trainer"]), len(jobs["rollout"])) == (1, 2)
        (request.run.run / "go").touch()
        wait_until(lambda: not active(scheduler, jobs), "the group has gone with the trial")
        log = request.run.batch_log("trainer", f"slurm-{jobs['trainer'][0]}_0").read_text()
        assert "Traceback" not in log, log


def test_elastic_group_grows_and_shrinks(scheduler: SlurmScheduler, tmp_path: Path) -> None:
    request = chain(tmp_path, STAY, 4, hosts=2, elastic=True)
    group = ElasticGroup(request.run, 1, "trainer", by="me")

    with everything_gone(scheduler, request):
        wait_until(lambda: running(scheduler, request) == 2, "two tasks run")
        assert group.keep(3).throttle == 3
        wait_until(lambda: running(scheduler, request) == 3, "three tasks run")
        assert group.keep(5).submit == 1
        wait_until(lambda: running(scheduler, request) == 5, "five tasks run")
        assert group.keep(1) == Change()  # those that run are asked to leave, not ended


def test_elastic_group_can_be_paused(scheduler: SlurmScheduler, tmp_path: Path) -> None:
    """While the group's array is held, no queued task replaces a task that ends."""
    request = chain(tmp_path, STAY, 4, hosts=2, elastic=True)
    group = ElasticGroup(request.run, 1, "trainer", by="me")

    with everything_gone(scheduler, request):
        wait_until(lambda: len(pids(request)) == 2, "two tasks run")
        assert group.keep(0) == Change(hold=True)
        for pid in pids(request):
            os.kill(pid, signal.SIGKILL)
        jobs = scheduler.recover(request.run, 1)
        wait_until(lambda: len(active(scheduler, jobs)) == 2, "they have ended")
        wait_until(lambda: group.keep(0) == Change(), "the others are known to be held")
        assert [task.reason for task in active(scheduler, jobs)] == [HELD, HELD]
        assert group.keep(2) == Change(throttle=2, release=True)
        wait_until(lambda: running(scheduler, request) == 2, "the others run")
