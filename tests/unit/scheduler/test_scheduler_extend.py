"""Extensions of a group by another array: each is submitted once, and claims without a job become
void. Slurm is scripted; tests/slurm has the real one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from slurmrl.errors import SchedulerError, UsageError
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import extensions
from slurmrl.scheduler.slurm import ElasticGroup, SlurmScheduler
from slurmrl.scheduler.states import QueueRow
from tests.support.scripted_slurm import Slurm


def test_extension_with_a_lost_reply_is_found_by_name(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    slurm.lose = True
    with pytest.raises(SchedulerError, match="did not answer"):
        scheduler.extend(run, 1, "trainer", by="41_0")
    slurm.lose = False
    assert scheduler.recover(run, 1) == {"trainer": ("41", "42")}
    assert scheduler.extend(run, 1, "trainer", by="41_1") == "42"
    assert list(slurm.jobs) == ["41", "42"]


def test_extension_waits_for_a_claimant_about_to_submit(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    """The other claim has no job yet, so another array would be one too many."""
    theirs = extensions.Claim(index=1, first=3, count=3, by="x", records=0)
    extensions.take(run, 1, "trainer", theirs)
    script = run.submission_script(1, "trainer")

    def they_submit(pause_s: float) -> None:
        slurm.submit(script, "--array=3-5%1", f"--job-name={slurm.jobs['41'][0]}.1")

    extender = extensions.Extender(slurm, run, 1, "trainer", sleep=they_submit)
    jobs = scheduler.recover(run, 1)
    assert extender.extend(scheduler.query(jobs), known=jobs["trainer"], by="y") == "42"
    assert list(slurm.jobs) == ["41", "42"]


def test_claim_without_a_job_becomes_void(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    theirs = extensions.Claim(index=1, first=3, count=3, by="x", records=0)
    extensions.take(run, 1, "trainer", theirs)
    times = iter([0.0, 1.0, extensions.SETTLE_S + 1])
    extender = extensions.Extender(
        slurm, run, 1, "trainer", sleep=lambda pause_s: None, clock=lambda: next(times)
    )
    assert extender.extend([], known=("41",), by="y") == "42"
    assert slurm.jobs["42"][1] == [6, 7, 8]


def test_later_arrays_are_found_if_the_first_is_unknown(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    """The submitter was killed before it recorded the id of the first array."""
    scheduler.extend(run, 1, "trainer", by="41_0")
    run.submission_jobs(1).unlink()
    slurm.running = ("42", 3)
    assert scheduler.recover(run, 1) == {"trainer": ("42",)}
    assert scheduler.extend(run, 1, "trainer", by="42_3") == "43"
    assert slurm.options[-1][-1] == "--dependency=afterany:42"


def test_void_claim_is_not_searched_again(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    """After a later array was submitted, each check needs no additional calls."""
    void = extensions.Claim(index=1, first=3, count=3, by="41_0", records=0)
    extensions.take(run, 1, "trainer", void)
    scheduler.recover(run, 1)
    assert slurm.looked_for, "it may have a job as long as nobody knows better"
    scheduler.extend(run, 1, "trainer", by="41_0")
    slurm.looked_for.clear()
    assert scheduler.recover(run, 1) == {"trainer": ("41", "42")}
    assert slurm.looked_for == []
    scheduler.extend(run, 1, "trainer", by="41_1")
    assert slurm.jobs["43"][1] == [9, 10, 11], "its numbers stay unused"


def test_late_job_of_a_void_claim_is_kept(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job appears before the array that replaces it, or when its suspended claimant continues
    after that.
    """
    script = run.submission_script(1, "trainer")
    name = slurm.jobs["41"][0]
    void = extensions.Claim(index=1, first=3, count=3, by="41_0", records=0)
    extensions.take(run, 1, "trainer", void)
    submit = slurm.submit

    def after_theirs(*arguments: Any, **inherited: Any) -> str:
        submit(script, "--array=3-5%1", f"--job-name={name}.1")
        return submit(*arguments, **inherited)

    monkeypatch.setattr(slurm, "submit", after_theirs)
    assert scheduler.extend(run, 1, "trainer", by="41_0") == "43"
    assert scheduler.recover(run, 1) == {"trainer": ("41", "42", "43")}
    monkeypatch.setattr(slurm, "submit", submit)
    extensions.take(run, 1, "trainer", replace(void, index=3, first=9))
    assert scheduler.extend(run, 1, "trainer", by="41_0") == "44"
    extensions.note(run, 1, "trainer", 3, "45")
    extensions.close(run, 1, "trainer", 3)
    assert scheduler.recover(run, 1) == {"trainer": ("41", "42", "43", "45", "44")}


def test_claims_do_not_become_void_if_squeue_does_not_answer(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The array was submitted, although squeue does not answer."""
    for index in (1, 2):
        void = extensions.Claim(index=index, first=3, count=3, by="x", records=0)
        extensions.take(run, 1, "trainer", void)
    submit, ask = slurm.submit, slurm.queue_by_name

    def silent(names: Iterable[str]) -> list[QueueRow]:
        raise SchedulerError("squeue did not answer")

    def last_word(*arguments: Any, **inherited: Any) -> str:
        monkeypatch.setattr(slurm, "queue_by_name", silent)
        return submit(*arguments, **inherited)

    monkeypatch.setattr(slurm, "submit", last_word)
    assert scheduler.extend(run, 1, "trainer", by="x") == "42"
    assert [one.open for one in extensions.read(run, 1, "trainer")] == [True, True, False]
    monkeypatch.setattr(slurm, "submit", submit)
    monkeypatch.setattr(slurm, "queue_by_name", ask)
    assert scheduler.extend(run, 1, "trainer", by="x") == "43"
    assert not any(one.open for one in extensions.read(run, 1, "trainer"))


def keep_beside(run: RunPaths, slurm: Slurm, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run link 1's upkeep of the group. Link 0, which is still alive, adds a task at the moment
    when squeue has answered link 1.
    """
    ask = getattr(slurm, when)

    def answer(wanted: Iterable[str]) -> list[QueueRow]:
        found: list[QueueRow] = ask(wanted)
        monkeypatch.setattr(slurm, when, ask)
        if when == "queue":
            ElasticGroup(run, 1, "trainer", slurm, by="40_0").keep(2)
        else:
            script = run.submission_script(1, "trainer")
            slurm.submit(script, "--array=3-3%1", f"--job-name={slurm.jobs['41'][0]}.1")
        return found

    monkeypatch.setattr(slurm, when, answer)
    ElasticGroup(run, 1, "trainer", slurm, by="40_1").keep(2)


def test_upkeep_submits_tasks_whose_submitter_was_killed_before(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the array of the trainers was submitted, and no job id was recorded."""
    run.submission_jobs(1).unlink()
    script = run.submission_script(1, "trainer").read_text()
    tasks = script.replace("-trainer", "-rollout")
    run.submission_script(1, "rollout").write_text(tasks)
    monkeypatch.setattr(slurm, "throttle", lambda job, count: None)
    group = ElasticGroup(run, 1, "rollout", slurm, by="41_0")
    alive = {"host": "elsewhere", "pid": 1, "time": time.time()}
    run.submission_request(1).write_text(json.dumps(alive))
    with pytest.raises(UsageError, match="has no group rollout yet"):
        group.keep(2)
    run.submission_request(1).write_text(json.dumps({**alive, "time": time.time() - 200}))
    assert group.keep(2).submit == 2
    assert group.keep(2).submit == 0
    assert slurm.jobs["42"] == (slurm.jobs["41"][0].replace("-trainer", "-rollout.1"), [3, 4])
    assert scheduler.recover(run, 1) == {"trainer": ("41",), "rollout": ("42",)}


def test_upkeep_waits_for_tasks_being_added_by_another_job(
    run: RunPaths, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two links of the trainers are alive at the same time. Neither may mistake the other's claim
    for its own earlier one.
    """
    slurm.running = ("41", 2)
    monkeypatch.setattr(extensions, "LOOK_S", 0.0)
    theirs = extensions.Claim(index=1, first=3, count=1, by="40_0", records=0)
    extensions.take(run, 1, "trainer", theirs)
    keep_beside(run, slurm, "queue_by_name", monkeypatch)
    assert list(slurm.jobs) == ["41", "42"]


def test_upkeep_waits_for_another_job_until_its_own_ends(run: RunPaths, slurm: Slurm) -> None:
    slurm.running = ("41", 2)
    theirs = extensions.Claim(index=1, first=3, count=1, by="40_0", records=0)
    extensions.take(run, 1, "trainer", theirs)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            raise UsageError("the link ends")

    group = ElasticGroup(run, 1, "trainer", slurm, by="40_1", sleep=sleep)
    with pytest.raises(UsageError, match="the link ends"):
        group.keep(3)
    assert list(slurm.jobs) == ["41"]


def test_upkeep_adds_no_tasks_after_a_concurrent_extension(
    run: RunPaths, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.running = ("41", 2)
    with pytest.raises(UsageError, match="another process has just extended group"):
        keep_beside(run, slurm, "queue", monkeypatch)
    assert list(slurm.jobs) == ["41", "42"]


def test_exhausted_array_indices_are_reported(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    slurm.array_size = "5"
    scheduler.extend(run, 1, "trainer", by="41_0")
    assert slurm.jobs["42"][1] == [3, 4]
    with pytest.raises(UsageError, match="all 5 array indices"):
        scheduler.extend(run, 1, "trainer", by="41_1")


def test_added_jobs_inherit_the_first_environment(
    run: RunPaths, slurm: Slurm, scheduler: SlurmScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set-up lines of a link change its PATH, and the set-up lines of the next link change it
    again.
    """
    before = os.environ["PATH"]
    monkeypatch.setenv("PATH", "/opt/module/bin:/usr/bin")
    scheduler.extend(run, 1, "trainer", by="41_0")
    inherited = slurm.inherited[-1]
    assert inherited is not None
    assert inherited["PATH"] == before
