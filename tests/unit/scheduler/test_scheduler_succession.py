"""The actions of a link at its end: more links, its own requeue, the end of the chain. Slurm is
scripted; tests/slurm has the real one.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import begin, end
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import chain
from slurmrl.scheduler.base import Continue
from slurmrl.scheduler.chain import (
    Link,
    TopUp,
    Upkeep,
    continue_after,
    continues,
    end_chain,
    top_up,
)
from slurmrl.scheduler.slurm import SlurmScheduler
from tests.support.scripted_slurm import Slurm
from tests.support.trials import wait_until


def link(run: RunPaths, index: int) -> Link:
    return Link(run, 1, "trainer", "41", index)


def add(link: Link, scheduler: SlurmScheduler) -> str | TopUp:
    return top_up(link, scheduler, by=link.element)


def commit(run: RunPaths, step: int) -> None:
    writer = begin(History(run.history), {"submission": 1, "job": "41.0.0"})
    writer.append(Kind.COMMIT, {"step": step, "directory": f"step-{step:08d}.{step}"})


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Link]:
    """Collect the links for which a function of `upkeep` was called and has ended."""
    function, calls = getattr(chain, name), []

    def call(link: Link, *arguments: object, **options: object) -> object:
        try:
            return function(link, *arguments, **options)
        finally:
            calls.append(link)

    monkeypatch.setattr(chain, name, call)
    return calls


def ended(looks: Upkeep) -> bool:
    return not any(thread.is_alive() for thread in looks._threads)


def test_jobs_are_added_when_few_are_left_and_the_trial_commits(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    assert add(link(run, 0), scheduler) is TopUp.ENOUGH
    slurm.running = ("41", 1)
    assert add(link(run, 1), scheduler) is TopUp.NO_COMMIT
    commit(run, 1)
    assert add(link(run, 1), scheduler) == "42"
    name = slurm.jobs["41"][0]
    assert slurm.options[-1] == (
        "--array=3-5%1",
        f"--job-name={name}.1",
        "--dependency=afterany:41",
    )
    assert add(link(run, 1), scheduler) is TopUp.ENOUGH
    slurm.running = ("42", 5)
    last = Link(run, 1, "trainer", "42", 5)
    assert add(last, scheduler) is TopUp.NO_COMMIT
    commit(run, 2)
    assert add(last, scheduler) == "43"
    assert scheduler.recover(run, 1) == {"trainer": ("41", "42", "43")}


def test_no_jobs_are_added_to_an_ended_trial(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    """The last link may try to add jobs while the end is written."""
    slurm.running = ("41", 2)
    commit(run, 1)
    end(History(run.history), Kind.FINISHED, {})
    assert add(link(run, 2), scheduler) is TopUp.ENDED
    assert top_up(link(run, 2), scheduler, by="me", requested=True) is TopUp.ENDED
    assert list(slurm.jobs) == ["41"]


def test_user_can_add_jobs_before_a_commit(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    slurm.running = ("41", 2)
    assert add(link(run, 2), scheduler) is TopUp.NO_COMMIT
    assert top_up(link(run, 2), scheduler, by="me", requested=True) == "42"


def test_commits_of_an_earlier_submission_are_ignored(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    writer = begin(History(run.history), {"submission": 0})
    writer.append(Kind.COMMIT, {"step": 1, "directory": "step-00000001.1"})
    begin(History(run.history), {"submission": 1})
    slurm.running = ("41", 2)
    assert add(link(run, 2), scheduler) is TopUp.NO_COMMIT


@pytest.mark.parametrize("mode", ["requeue", "none"])
def test_submission_without_a_chain_gets_no_jobs(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler, mode: str
) -> None:
    run.submission_request(1).write_text(json.dumps({"continue": mode}))
    slurm.running = ("41", 2)
    commit(run, 1)
    assert add(link(run, 2), scheduler) is TopUp.NO_CHAIN
    assert continues(link(run, 2)) is Continue(mode)


def test_end_of_trial_cancels_every_later_array(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    scheduler.extend(run, 1, "trainer", by="41_0")
    slurm.running = ("41", 1)
    end_chain(link(run, 1), scheduler)
    assert slurm.done == ["cancel 41_[2]", "cancel 42_[3-5]"]


def test_ending_job_reports_the_following_job(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    assert continue_after(link(run, 0), scheduler) == "41_1 follows, 2 left"
    slurm.running = ("41", 2)
    assert "slurmrl resume" in continue_after(link(run, 2), scheduler)
    run.submission_request(1).write_text('{"continue": "none"}')
    assert "continue: none" in continue_after(link(run, 2), scheduler)


def test_only_a_job_that_started_an_incarnation_is_requeued(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.submission_request(1).write_text('{"continue": "requeue"}')
    monkeypatch.setenv("SLURM_JOB_ID", "44")
    assert "no incarnation began" in continue_after(link(run, 0), scheduler)
    begin(History(run.history), {"job": "44.0.0"})
    assert continue_after(link(run, 0), scheduler) == "41_0 was requeued"
    assert slurm.done == ["requeue 41_0"]
    again = Link(run, 1, "trainer", "41", 0, restart=1)
    assert "no incarnation began" in continue_after(again, scheduler)


def test_job_cancelled_by_the_user_is_not_requeued(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.submission_request(1).write_text('{"continue": "requeue"}')
    monkeypatch.setenv("SLURM_JOB_ID", "44")
    begin(History(run.history), {"job": "44.0.0"})
    slurm.state = "COMPLETING"
    assert "is not requeued" in continue_after(link(run, 0), scheduler)
    assert slurm.done == []


def test_chain_cancelled_by_the_user_gets_no_more_jobs(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    """The cancelled link still commits, because it has some seconds until it is killed."""
    slurm.running, slurm.state = ("41", 2), "COMPLETING"
    commit(run, 1)
    assert add(link(run, 2), scheduler) is TopUp.ENDING
    assert "no link is left" in continue_after(link(run, 2), scheduler)
    assert list(slurm.jobs) == ["41"]


def test_job_does_not_start_a_second_extension(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    slurm.running = ("41", 2)
    commit(run, 1)
    assert continue_after(link(run, 2), scheduler, extend=False).startswith("no link is left")
    assert slurm.tries == 1


def test_missing_sbatch_does_not_fail_the_job(
    run: RunPaths, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "cannot determine which job follows" in continue_after(link(run, 0))
    end_chain(link(run, 0))
    monkeypatch.setattr(chain, "RETRY_S", 0.0)
    tries = counted(monkeypatch, "top_up")
    looks = Upkeep(link(run, 0), {}, pytest.fail)
    looks.start()
    wait_until("the last try", lambda: ended(looks))
    assert len(tries) == chain.TRIES
    assert signal.SIGUSR2 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.fixture
def _everywhere(monkeypatch: pytest.MonkeyPatch, slurm: Slurm) -> None:
    """Replace every scheduler by the scripted one, and shorten waits."""
    monkeypatch.setattr(chain, "slurm", lambda: SlurmScheduler(slurm))
    for pause in ("RETRY_S", "COMMIT_S", "KEEP_S"):
        monkeypatch.setattr(chain, pause, 0.01)


@pytest.mark.usefixtures("_everywhere")
def test_running_job_requests_more_jobs_after_a_commit(
    run: RunPaths, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.running = ("41", 2)
    told: list[str] = []
    seen = counted(monkeypatch, "committed")
    looks = Upkeep(link(run, 2), {}, told.append)
    looks.start()
    wait_until("looks at a history without a commit", lambda: len(seen) > 1)
    assert told == []
    assert list(slurm.jobs) == ["41"]
    commit(run, 1)
    wait_until("more links", lambda: told)
    looks.stop()
    assert told == ["42"]
    assert list(slurm.jobs) == ["41", "42"]


@pytest.mark.usefixtures("_everywhere")
def test_rejected_sbatch_is_retried_a_few_times_and_at_job_end(run: RunPaths, slurm: Slurm) -> None:
    slurm.running = ("41", 2)
    commit(run, 1)
    slurm.reject, slurm.tries = "sbatch: error: Access/permission denied", 0
    looks = Upkeep(link(run, 2), {}, pytest.fail)
    looks.start()
    wait_until("the last try", lambda: ended(looks))
    assert slurm.tries == chain.TRIES
    assert "no link is left" in continue_after(link(run, 2))
    slurm.reject = ""
    assert continue_after(link(run, 2)).endswith("follows, 3 left")
    assert slurm.jobs["42"][1] == [3, 4, 5], "numbers that were refused are used again"
