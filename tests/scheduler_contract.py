"""Tests that every scheduler must pass; its test module defines the fixtures ``scheduler`` and
``ask``.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import (
    GroupRequest,
    JobIds,
    JobState,
    Scheduler,
    SubmissionRequest,
    TaskState,
)
from slurmrl.scheduler.submission import ProcessId

TIMEOUT_S = 300.0
STAY = "import os, time; open('pid', 'a').write(f'{os.getpid()}\\n'); time.sleep(600)"
"""Adds its pid to a file in the run directory and keeps running."""
STOP_ON_WARNING = """
import pathlib, signal, sys
def stop(number, frame):
    pathlib.Path("stopped").touch()
    sys.exit(0)
signal.signal(signal.SIGUSR2, stop)
pathlib.Path("ready").touch()
while True:
    signal.pause()
"""

Ask = Callable[..., SubmissionRequest]
"""``ask(python_code, links=2, **more)`` -> a request whose links execute that code."""


def request_of(
    run: Path, code: str, *, number: int = 1, links: int = 2, options: Any = None, **group: Any
) -> SubmissionRequest:
    paths = RunPaths(run)
    for directory in paths.directories():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return SubmissionRequest(
        number=number,
        uuid=uuid.uuid4().hex,
        trial="experiment/trial",
        run=paths,
        python=sys.executable,
        groups=(
            GroupRequest(
                name="trainer", links=links, command=(sys.executable, "-c", code), **group
            ),
        ),
        options=options or {},
    )


@contextmanager
def submitted(
    scheduler: Scheduler, request: SubmissionRequest
) -> Iterator[dict[str, tuple[str, ...]]]:
    """Yield the jobs of a request; always cancel the jobs afterwards."""
    jobs = scheduler.submit(request)
    try:
        yield jobs
    finally:
        scheduler.kill(jobs)
        wait_until(lambda: not active(scheduler, jobs), "the jobs end")


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {TIMEOUT_S} s until {what}"
        time.sleep(0.05)


def active(scheduler: Scheduler, jobs: JobIds) -> list[TaskState]:
    return [task for task in scheduler.query(jobs) if task.state.active]


def state(scheduler: Scheduler, jobs: JobIds, element: int) -> JobState | None:
    found = [task.state for task in scheduler.query(jobs) if task.element == element]
    assert len(found) <= 1, "an element is listed once"
    return found[0] if found else None


def wait_running(scheduler: Scheduler, jobs: JobIds, element: int) -> None:
    wait_until(lambda: state(scheduler, jobs, element) is JobState.RUNNING, f"link {element} runs")


def pids(request: SubmissionRequest) -> list[int]:
    file = request.run.run / "pid"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def test_jobs_of_a_chain_run_in_turn_and_keep_their_output(scheduler: Scheduler, ask: Ask) -> None:
    code = "import os; print('link', os.environ['SLURM_ARRAY_TASK_ID'])"
    request = ask(code)
    with submitted(scheduler, request) as jobs:
        wait_until(
            lambda: [state(scheduler, jobs, link) for link in (0, 1)] == [JobState.COMPLETED] * 2,
            "both links complete",
        )
        logs = sorted((request.run.logs / "trainer").glob(f"*{jobs['trainer'][0]}_*.out"))
        assert [log.read_text() for log in logs] == ["link 0\n", "link 1\n"]


def test_running_and_pending_jobs_are_named_by_element(scheduler: Scheduler, ask: Ask) -> None:
    with submitted(scheduler, ask(STAY, links=3)) as jobs:
        wait_running(scheduler, jobs, 0)
        tasks = scheduler.query(jobs)
        (job,) = jobs["trainer"]
        assert [task.job_id for task in tasks] == [f"{job}_0", f"{job}_1", f"{job}_2"]
        assert [task.state for task in tasks] == [JobState.RUNNING, *[JobState.PENDING] * 2]
        assert {task.group for task in tasks} == {"trainer"}
        assert len(tasks[0].hosts) == 1
        assert tasks[1].hosts == ()
        assert tasks[1].reason


def test_next_job_follows_a_killed_job(scheduler: Scheduler, ask: Ask) -> None:
    request = ask(STAY)
    with submitted(scheduler, request) as jobs:
        wait_until(lambda: len(pids(request)) == 1, "link 0 has started")
        os.kill(pids(request)[0], signal.SIGKILL)
        wait_until(lambda: len(pids(request)) == 2, "link 1 has started")
        wait_running(scheduler, jobs, 1)
        assert state(scheduler, jobs, 0) is JobState.FAILED


def test_cancel_ends_running_and_pending_jobs(scheduler: Scheduler, ask: Ask) -> None:
    request = ask(STAY, links=3)
    with submitted(scheduler, request) as jobs:
        wait_until(lambda: pids(request), "link 0 has started")
        scheduler.cancel(jobs)
        wait_until(lambda: not active(scheduler, jobs), "the job ends")
        assert state(scheduler, jobs, 0) is JobState.CANCELLED
        assert len(pids(request)) == 1
        scheduler.cancel(jobs)  # a second cancellation is no error


def test_cancel_keeps_the_named_element(scheduler: Scheduler, ask: Ask) -> None:
    request = ask(STOP_ON_WARNING, links=3)
    with submitted(scheduler, request) as jobs:
        wait_until((request.run.run / "ready").exists, "the link has its handler")
        wait_running(scheduler, jobs, 0)
        scheduler.cancel(jobs, spare=f"{jobs['trainer'][0]}_0")
        scheduler.interrupt(jobs)
        wait_until(lambda: not active(scheduler, jobs), "link 0 ends")
        assert state(scheduler, jobs, 0) is JobState.COMPLETED
        assert state(scheduler, jobs, 1) in (None, JobState.CANCELLED)


def test_interrupt_warns_the_running_job_and_ends_the_chain(scheduler: Scheduler, ask: Ask) -> None:
    request = ask(STOP_ON_WARNING, links=3)
    with submitted(scheduler, request) as jobs:
        wait_until((request.run.run / "ready").exists, "the link has its handler")
        wait_running(scheduler, jobs, 0)
        scheduler.interrupt(jobs)
        wait_until(lambda: not active(scheduler, jobs), "the link ends")
        assert (request.run.run / "stopped").exists()
        assert state(scheduler, jobs, 0) is JobState.COMPLETED
        assert state(scheduler, jobs, 1) in (None, JobState.CANCELLED)


def test_kill_ends_a_process_that_ignores_signals(scheduler: Scheduler, ask: Ask) -> None:
    request = ask(
        "import signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 10, 12, 15)]\n" + STAY
    )
    with submitted(scheduler, request) as jobs:
        wait_until(lambda: pids(request), "the link has started")
        wait_running(scheduler, jobs, 0)
        scheduler.kill(jobs)
        wait_until(lambda: not active(scheduler, jobs), "the job ends")
        wait_until(lambda: ProcessId.of(pids(request)[0]) is None, "the process ends")
        assert len(pids(request)) == 1


def test_job_gets_a_clean_environment(
    scheduler: Scheduler, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.setenv("SBATCH_JOB_NAME", "stray")
    code = "import json, os; json.dump([os.getcwd(), dict(os.environ)], open('environment', 'w'))"
    request = ask(code, links=1, options={"slurm": {"setup": ["export GREETING='hello \"you\"'"]}})
    with submitted(scheduler, request) as jobs:
        wait_until(lambda: state(scheduler, jobs, 0) is JobState.COMPLETED, "the link completes")
    folder, environ = json.loads((request.run.run / "environment").read_text())
    assert folder == str(request.run.run)
    assert environ["GREETING"] == 'hello "you"'
    assert environ["PYTHONPATH"] == str(request.run.code)
    assert environ["HOME"] == os.environ["HOME"]
    assert (environ["SLURM_ARRAY_JOB_ID"],) == jobs["trainer"]
    assert "SOME_TOKEN" not in environ
    assert "SBATCH_JOB_NAME" not in environ


def test_ids_are_recovered_even_if_they_were_never_written(scheduler: Scheduler, ask: Ask) -> None:
    request = ask(STAY)
    with submitted(scheduler, request) as jobs:
        wait_running(scheduler, jobs, 0)
        again = type(scheduler)()
        assert again.recover(request.run, 1) == jobs
        assert state(again, jobs, 0) is JobState.RUNNING
        request.run.submission_jobs(1).unlink()
        assert again.recover(request.run, 1) == jobs
        assert again.recover(request.run, 2) == {}


def test_batch_scripts_are_private(scheduler: Scheduler, ask: Ask) -> None:
    request = ask("pass", links=1)
    with submitted(scheduler, request):
        script = request.run.submission_script(1, "trainer")
        assert stat.S_IMODE(script.stat().st_mode) == 0o600
        assert script.read_text() == scheduler.scripts(request)["trainer"]
