from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmrl.cli import status_text
from slurmrl.fsio import documents
from slurmrl.run import keys
from slurmrl.run.history.slots import END_OF_DATASET, Kind
from slurmrl.run.reports import RolloutsView, RolloutTaskView
from slurmrl.scheduler.base import JobState, TaskState
from slurmrl.scheduler.submission import newest_submission
from slurmrl.watch.snapshot import read
from slurmrl.watch.status import assemble, present_link
from tests.fake_runs import FakeRun, task

RUNNING, PENDING, FAILED = JobState.RUNNING, JobState.PENDING, JobState.FAILED


CONTRACT = (
    *("trial", "state", "step", "total_steps", "incarnation", "metrics", "checkpoint", "groups"),
    *("reason", "traceback", "run", "export"),
)
"""The fields of the first version, in full."""
ADDED = {
    "stopped_by",
    "submitting",
    "doing",
    *("diagnosis", "findings", "phase", "warned", "waiting", "links_left", "link", "pending"),
    *(
        "checkpoint_failures",
        "skipped",
        "unjudged",
        "timing",
        "submission",
        "submitted",
        "incarnations",
    ),
    *("avoided", "failed_starts"),
    *("free_bytes", "results", "rollouts", "report"),
}


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    run = FakeRun(tmp_path)
    run.submission()
    return run


def look(run: FakeRun, *tasks: TaskState, **more: Any) -> dict[str, Any]:
    return assemble(read(run.paths), tasks, **more)


def test_status_shows_rollout_tasks_of_a_running_trial(run: FakeRun) -> None:
    """The numbers come from the master. The speed is the mean of a task's counts."""
    incarnation = run.begin()
    run.attempt("41_1")
    works = RolloutTaskView(
        task="rollout/0",
        attempt=1,
        host="n7",
        version="12.2",
        leased=4,
        counts={"tokens": 900.0, "seconds": 3.0},
        problem="cannot write x: No space left",
    )
    view = RolloutsView(wanted=4, tasks=(works, RolloutTaskView(task="rollout/3", attempt=0)))
    run.say(incarnation, step=12, rollouts=documents.to_json(view))
    found = look(run, task(1, RUNNING, hosts=("n0",)), alive=True)["rollouts"]
    assert (found["wanted"], found["waits_for"], found["dropped"]) == (4, "", {})
    told = [(one["task"], one["state"], one["tokens_per_s"]) for one in found["tasks"]]
    assert told == [("rollout/0", "works", 300.0), ("rollout/3", "starting", None)]
    assert [one["problem"] for one in found["tasks"]] == ["cannot write x: No space left", ""]
    run.end(Kind.CANCELLED)
    assert look(run, task(1, FAILED))["rollouts"] is None


def test_rollout_tasks_have_their_own_last_error(run: FakeRun) -> None:
    """The error comes from the last attempt of an element. Slurm may have another reason."""
    groups = [
        {"name": "trainer", "hosts": 1, "elastic": False},
        {"name": "rollout", "hosts": 2, "elastic": True},
    ]
    run.paths.plan.write_text(json.dumps({"groups": groups}))
    incarnation = run.begin()
    run.attempt("41_1")
    waits = RolloutsView(wanted=2, waits_for="for a rollout task")
    run.say(incarnation, rollouts=documents.to_json(waits))
    for number, (text, attempts) in enumerate([("first", 2), ("second", 1), ("third", 1)]):
        for attempt in range(attempts):
            place = {"task": number, "attempt": attempt, "host": "n7", "job": "42.0.0"}
            key = keys.attempt("rollout", number, attempt)
            run.name(key, group="rollout", job_id=f"42_{number}", **place)
        if text != "third":
            key = keys.attempt_failure("rollout", number, 0)
            reason = f"ValueError: {text} {'x' * 300}\nmore"
            run.name(key, cause="exception", rank=0, host="n7", exception=reason)
    failed = {"group": "rollout", "reason": "NonZeroExitCode"}
    elements = [replace(task(number, FAILED), job_id=f"42_{number}", **failed) for number in (0, 1)]
    elements.append(replace(task(2, PENDING), group="rollout", reason="JobArrayTaskLimit"))
    status = look(run, task(1, RUNNING, hosts=("n0",)), *elements, alive=True)
    first, second, third = (one["reason"] for one in status["groups"][1]["tasks"])
    assert (first, third) == ("NonZeroExitCode", "JobArrayTaskLimit")
    assert second.startswith("rank 0: ValueError: second xxx")
    assert (len(second), second[-1]) == (200, "…")
    assert second in status_text.one(status)
    assert (
        "the last task (rollout/1 on n7) failed: rank 0: ValueError: second" in status["diagnosis"]
    )


def test_status_of_a_running_trial_equals_the_documented_object(
    run: FakeRun, tmp_path: Path
) -> None:
    incarnation = run.begin()
    run.commit(10)
    run.attempt("41_1")
    run.say(
        incarnation,
        step=12,
        checkpoint={"step": 10, "age_s": 3.5},
        tasks={"trainer/0": {"lease_age_s": 0.4, "host": "n0", "attempt": 0}},
    )
    run.metrics({"step": 11, "reward": 0.3}, {"step": 12, "reward": 0.4})
    elements = [
        task(0, FAILED),
        task(1, RUNNING, hosts=("n0",)),
        *(task(index, PENDING, reason="JobArrayTaskLimit") for index in (2, 3)),
    ]
    found = look(run, *elements, alive=True)
    assert {name: found[name] for name in CONTRACT} == {
        "trial": "add/1",
        "state": "RUNNING",
        "step": 12,
        "total_steps": 60,
        "incarnation": 1,
        "metrics": {"step": 12, "reward": 0.4},
        "checkpoint": {"step": 10, "age_s": 3.5},
        "groups": [
            {
                "name": "trainer",
                "links_left": 2,
                "tasks": [
                    {
                        "job_id": "41_1",
                        "host": "n0",
                        "state": "RUNNING",
                        "attempt": 0,
                        "lease_age_s": 0.4,
                        "reason": "",
                    }
                ],
            }
        ],
        "reason": None,
        "traceback": None,
        "run": str(run.paths.run),
        "export": None,
    }


def test_status_has_exactly_the_documented_fields(run: FakeRun) -> None:
    assert set(look(run)) == {*CONTRACT, *ADDED}


def test_pending_trial_has_pending_tasks_and_no_checkpoint(run: FakeRun) -> None:
    status = look(run, task(0, PENDING, reason="Resources"), task(1, PENDING))
    assert (status["state"], status["step"], status["incarnation"]) == ("PENDING", 0, 0)
    assert status["checkpoint"] is None
    assert status["groups"][0]["tasks"] == [
        {
            "job_id": "41_0",
            "host": None,
            "state": "PENDING",
            "attempt": None,
            "lease_age_s": None,
            "reason": "Resources",
        }
    ]
    assert "unconfirmed" not in status


def test_hosts_of_a_job_come_from_its_tasks(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, hosts=2)
    run.submission()
    run.attempt("41_0", task=1, host="n7")
    status = look(run, task(0, RUNNING, hosts=("n3", "n4")))
    assert [one["host"] for one in status["groups"][0]["tasks"]] == ["n3", "n7"]


def test_attempt_of_an_earlier_job_is_not_shown_for_the_current_job(run: FakeRun) -> None:
    run.attempt("41_0", number=0, host="old")
    status = look(run, task(0, FAILED), task(1, PENDING))
    (shown,) = status["groups"][0]["tasks"]
    assert (shown["job_id"], shown["attempt"], shown["host"]) == ("41_1", None, None)


def test_newest_attempt_is_chosen_by_number(run: FakeRun) -> None:
    for number in range(11):
        run.attempt(f"41_{number}", number=number)
    assert read(run.paths).attempts["trainer", 0].attempt == 10


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (Kind.FINISHED, "COMPLETED"),
        (Kind.FAILED, "FAILED"),
        (Kind.CANCELLED, "CANCELLED"),
    ],
)
def test_end_of_a_trial_comes_from_the_history(run: FakeRun, kind: Kind, state: str) -> None:
    run.begin()
    run.commit(20)
    run.paths.export(20).mkdir()
    run.append(Kind.EXPORT, step=20, directory="step-00000020")
    run.attempt("41_0")
    run.end(kind, step=20, reason="because", traceback="Traceback")
    status = look(run, task(0, RUNNING))
    assert status["state"] == state
    assert (status["step"], status["reason"]) == (20, "because")
    assert status["checkpoint"] == {"step": 20, "age_s": None}
    assert status["export"] == str(run.paths.exports / "step-00000020")
    assert "unconfirmed" not in status


def test_tasks_of_an_ended_trial_have_ended(run: FakeRun) -> None:
    run.begin()
    run.attempt("41_0")
    run.end(Kind.FAILED, reason="x")
    (shown,) = look(run)["groups"][0]["tasks"]
    assert (shown["job_id"], shown["state"]) == ("41_0", "FAILED")


def test_resumed_trial_has_not_ended(run: FakeRun) -> None:
    run.begin()
    run.end(Kind.CANCELLED)
    run.resume()
    assert look(run, task(0, PENDING))["state"] == "PENDING"


def test_trial_without_jobs_and_end_is_interrupted_at_its_commit(run: FakeRun) -> None:
    incarnation = run.begin()
    run.commit(10)
    run.say(incarnation, step=13, checkpoint={"step": 10, "age_s": 5.0}, tasks={})
    status = look(run, task(0, FAILED), task(1, JobState.CANCELLED))
    assert (status["state"], status["step"]) == ("INTERRUPTED", 10)
    assert status["checkpoint"] == {"step": 10, "age_s": None}


def test_status_of_an_earlier_incarnation_is_ignored(run: FakeRun) -> None:
    first = run.begin()
    run.commit(10)
    run.say(first, step=15, checkpoint={"step": 10, "age_s": 1.0}, tasks={})
    run.begin()
    status = look(run, task(0, RUNNING))
    assert (status["step"], status["incarnation"]) == (10, 2)
    assert status["checkpoint"]["age_s"] is None


def test_running_trial_with_a_stale_lease_is_unconfirmed(run: FakeRun) -> None:
    run.attempt("41_0", job="7.0.0")
    assert look(run, task(0, RUNNING), alive=False)["unconfirmed"] is True
    assert "unconfirmed" not in look(run, task(0, RUNNING)), "nobody looked"
    suspended = task(0, RUNNING, raw="SUSPENDED", words="suspended, keeps its hosts")
    told = look(run, suspended, alive=False)["diagnosis"]
    assert "no heartbeat from its first host; job 41_0: suspended, keeps its hosts" in told


@pytest.mark.parametrize("now", [task(1, RUNNING), task(0, RUNNING, restarts=1)])
def test_just_started_job_needs_no_heartbeat(run: FakeRun, now: TaskState) -> None:
    run.attempt("41_0", job="7.0.0")
    status = look(run, now, alive=False)
    assert "unconfirmed" not in status
    assert status["groups"][0]["tasks"][0]["attempt"] is None
    assert "its processes have reported nothing yet" in status["diagnosis"]


@pytest.mark.parametrize(("alive", "state"), [(True, "RUNNING"), (False, "INTERRUPTED")])
def test_lease_decides_if_the_scheduler_does_not_answer(
    run: FakeRun, alive: bool, state: str
) -> None:
    status = look(run, alive=alive, problem="squeue did not answer")
    assert (status["state"], status["problem"]) == (state, "squeue did not answer")
    assert status.get("unconfirmed", False) is not alive


def test_trial_that_was_never_submitted_is_interrupted_without_groups(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.paths.plan.unlink()
    status = look(run)
    assert (status["state"], status["total_steps"], status["groups"]) == ("INTERRUPTED", None, [])


def test_status_reads_the_newest_submission_with_a_request(run: FakeRun) -> None:
    for number in range(2, 12):
        run.submission(number, scheduler="slurm")
    run.paths.submission(12).mkdir()
    newest = newest_submission(run.paths)
    assert newest is not None
    assert (newest.number, newest.scheduler) == (11, "slurm")


@pytest.mark.parametrize(
    ("states", "present"),
    [
        ([FAILED, RUNNING, PENDING], 1),
        ([FAILED, PENDING, PENDING], 1),
        ([FAILED, JobState.TIMEOUT, JobState.CANCELLED], 1),
        ([JobState.CANCELLED, JobState.CANCELLED], 1),
    ],
)
def test_current_job_of_a_chain_is_found(states: list[JobState], present: int) -> None:
    link = present_link([task(index, state) for index, state in enumerate(states)])
    assert link is not None
    assert link.element == present


def test_each_element_of_an_elastic_group_is_a_task(run: FakeRun) -> None:
    run.paths.plan.write_text('{"groups": [{"name": "rollout", "hosts": 2, "elastic": true}]}')
    elements = [
        task(0, RUNNING, group="rollout", hosts=("n1",)),
        task(1, RUNNING, group="rollout", hosts=("n2",)),
        task(2, PENDING, group="rollout"),
    ]
    (group,) = look(run, *elements)["groups"]
    assert [(one["host"], one["state"]) for one in group["tasks"]] == [
        ("n1", "RUNNING"),
        ("n2", "RUNNING"),
        (None, "PENDING"),
    ]
    assert group["links_left"] == 0


def test_ended_job_of_a_task_has_its_reason_in_words(run: FakeRun) -> None:
    run.paths.plan.write_text('{"groups": [{"name": "rollout", "hosts": 2, "elastic": true}]}')
    words = "used more memory than it requested"
    ends = {"group": "rollout", "words": words, "reason": "NonZeroExitCode"}
    elements = [task(0, JobState.OUT_OF_MEMORY, **ends), task(1, JobState.COMPLETED, **ends)]
    (group,) = look(run, *elements)["groups"]
    assert [one["reason"] for one in group["tasks"]] == [words, "NonZeroExitCode"]


def test_tasks_of_other_groups_do_not_make_a_trial_run(run: FakeRun) -> None:
    """If a rollout task has GPUs while the trainers' job waits in the queue, the trial does not
    count as running. Its remaining time is not the task's.
    """
    trainers = '{"name": "trainer", "hosts": 1, "elastic": false}'
    rollout = '{"name": "rollout", "hosts": 1, "elastic": true}'
    run.paths.plan.write_text(f'{{"groups": [{rollout}, {trainers}]}}')
    rolls = task(0, RUNNING, group="rollout", hosts=("n1",))
    found = look(run, task(0, PENDING, reason="Priority"), rolls)
    assert (found["state"], found["link"]) == ("PENDING", None)
    assert found["pending"]["reason"] == "Priority"
    assert look(run, rolls)["state"] == "INTERRUPTED"


def trained(step: int, skipped: float, updates: float = 2.0) -> dict[str, Any]:
    return {"step": step, "actor_updates": updates, "actor_skipped": skipped, "critic_skipped": 0.0}


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ([trained(1, 0), *(trained(step, 2) for step in (2, 3, 4))], (3, "actor")),
        ([trained(1, 2), trained(2, 2)], None),
        ([trained(1, 2), trained(2, 2), trained(3, 1)], None),
        ([trained(1, 2), trained(2, 2), trained(3, 2), trained(4, 1)], None),
        ([{"step": step, "loss": None, "skipped": 1.0} for step in (1, 2, 3)], (3, "")),
        ([{"step": step, "reward": 0.5} for step in (1, 2, 3)], None),
        (
            [trained(1, 2), trained(2, 2), trained(3, 2), {"step": 3, "eval/reward": 0}],
            (3, "actor"),
        ),
    ],
)
def test_skipped_updates_are_reported_for_the_last_steps(
    run: FakeRun, lines: list[dict[str, Any]], wanted: tuple[int, str] | None
) -> None:
    run.begin()
    run.metrics(*lines)
    found = look(run, task(0, RUNNING))["skipped"]
    assert found == (None if wanted is None else {"steps": wanted[0], "model": wanted[1]})


def test_short_trial_without_updates_is_reported(run: FakeRun) -> None:
    run.begin()
    run.metrics(trained(1, 2), trained(2, 2))
    run.end(Kind.FINISHED, step=2)
    found = look(run)
    assert found["skipped"] == {"steps": 2, "model": "actor"}
    assert found["diagnosis"].startswith("the model did not change")


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [
        ([0.0] * 10 + [0.5] * 10, {"steps": 20, "share": 0.25}),
        ([0.0, 0.875], {"steps": 2, "share": 0.4375}),
        ([0.9] * 10 + [0.0] * 20, None),
        ([0.05] * 20, None),
        ([], None),
    ],
)
def test_unscored_completions_of_the_newest_steps_are_reported(
    run: FakeRun, shares: list[float], wanted: dict[str, float] | None
) -> None:
    run.begin()
    run.metrics(*({"step": n, "reward_unjudged": share} for n, share in enumerate(shares, 1)))
    assert look(run, task(0, RUNNING))["unjudged"] == wanted


def test_total_steps_of_an_offline_pass_come_from_the_master(
    tmp_path: Path,
) -> None:
    run = FakeRun(tmp_path)
    run.submission(total_steps=None)
    assert look(run)["total_steps"] is None
    run.say(run.begin(), step=2, total_steps=7)
    assert look(run)["total_steps"] == 7


def test_finished_offline_pass_has_the_number_of_steps_of_its_dataset(tmp_path: Path) -> None:
    """Also covers a trial that an older version submitted with the limit."""
    run = FakeRun(tmp_path)
    run.submission(total_steps=100)
    run.say(run.begin(submission=1), step=6, total_steps=6)
    run.end(Kind.FINISHED, step=6, reason=END_OF_DATASET)
    status = look(run)
    assert (status["step"], status["total_steps"], status["diagnosis"]) == (6, 6, "finished")
    assert status_text.progress(status) == "6/6"
    run.resume()
    run.submission(2, total_steps=200)
    assert look(run)["total_steps"] == 200
    run.say(run.begin(submission=2), step=6, total_steps=200)
    assert look(run)["total_steps"] == 200


def test_results_are_shown_once_their_files_exist(run: FakeRun) -> None:
    assert look(run)["results"] is None
    run.paths.results.touch()
    file = str(run.paths.results)
    assert look(run)["results"] == {"file": file, "summary": None}
    run.paths.summary.touch()
    assert look(run)["results"] == {"file": file, "summary": str(run.paths.summary)}
