from __future__ import annotations

from typing import Any

import pytest

from slurmrl.watch.diagnosis import diagnose
from tests.fake_status import incarnation, pending, rollouts, status, timing

SLOW = timing(step_s=280.0, commit_s=20.0, left_s=13440.0)
SHORT = [
    incarnation(number, cause="time_limit", how="time limit", commit=None) for number in (1, 2)
]
WAITING = {"for": [3], "hosts": ["n1"], "what": "to finish gen of step 13", "since_s": 200.0}
MANY = {"for": list(range(16)), "hosts": [f"n{i}" for i in range(8)], "what": "to be ready"}
FULL = {"count": 2, "step": 30, "reason": "no space left\nmore", "last_commit_s": 2400.0}
ENDED = incarnation(2, cause="preemption", how="preempted (SIGTERM), handed over at step 12")


def link(runs_s: float) -> dict[str, Any]:
    return {"job_id": "41_1", "time_left_s": 1200.0, "runs_s": runs_s}


def ended(state: str, reason: str | None, **changes: Any) -> dict[str, Any]:
    return status(state=state, reason=reason, **changes)


CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "a host where nothing starts": (
        status(
            state="INTERRUPTED",
            incarnations=[],
            failed_starts={"count": 3, "host": "n3", "why": "python: not found"},
        ),
        "failed_starts",
        "3 starts in a row failed before an incarnation began; the last on n3: python: not found",
    ),
    "running": (
        status(),
        "running",
        "2 s a step, about 96 s left",
    ),
    "running, no step yet": (
        status(step=0, timing=timing(step_s=None, left_s=None)),
        "running",
        "running",
    ),
    "starting": (status(phase="starting"), "starting", "starting"),
    "starting, waits for somebody": (
        status(phase="starting", waiting={**MANY, "since_s": 8.0}),
        "starting",
        "starting, waiting for ranks 0, 1, 2, 3, 4, 5, 6, 7 and 8 more (n0, n1, n2, n3 …) "
        "to be ready",
    ),
    "waits long": (
        status(waiting=WAITING),
        "waiting",
        "has been waiting 3.3 min for rank 3 (n1) to finish gen of step 13",
    ),
    "no rollout task": (
        status(
            rollouts=rollouts(tasks=[], waits_for="for a rollout task"),
            groups=[{"name": "rollout", "tasks": [{"state": "PENDING", "reason": "Priority"}]}],
        ),
        "rollouts",
        "the trainers wait for a rollout task: none runs (Priority)",
    ),
    "rollout tasks fail": (
        status(
            rollouts=rollouts(
                tasks=[],
                waits_for="for a rollout task",
                failed={"task": "rollout/5", "host": "n1", "why": "rank 0: ValueError: x"},
            ),
            groups=[
                {"name": "rollout", "tasks": [{"state": "PENDING", "reason": "JobArrayTaskLimit"}]}
            ],
        ),
        "rollouts",
        "the trainers wait for a rollout task: none runs (JobArrayTaskLimit); the last one "
        "(rollout/5 on n1) failed: rank 0: ValueError: x",
    ),
    "no rollout task is wanted": (
        status(rollouts=rollouts(tasks=[], wanted=0)),
        "rollouts",
        "generation is paused; to go on: slurmrl scale add/1 N",
    ),
    "rollout tasks work": (
        status(rollouts=rollouts()),
        "running",
        "2 s a step, about 96 s left",
    ),
    "long steps may take long": (
        status(waiting=WAITING, timing=timing(step_s=50.0, left_s=2400.0)),
        "running",
        "50 s a step, about 40 min left",
    ),
    "waits for all": (
        status(waiting={**WAITING, "for": [0, 1], "of": 2}),
        "waiting",
        "has been waiting 3.3 min for all 2 ranks to finish gen of step 13",
    ),
    "a job has just started": (
        status(incarnation=0, incarnations=[], link=link(4.0)),
        "starting",
        "starting: its job started 4 s ago, no sign of its processes yet",
    ),
    "a job that says nothing": (
        status(incarnation=0, incarnations=[], link=link(300.0)),
        "starting",
        "starting: its job started 5 min ago, no sign of its processes yet; see slurmrl logs add/1",
    ),
    "restarts": (
        status(incarnations=[incarnation(1, how="rank 3 on n1 died: SIGKILL")]),
        "restarting",
        "restarting after: rank 3 on n1 died: SIGKILL",
    ),
    "warned of its end": (
        status(warned="time limit"),
        "stopping",
        "time limit: stops at the next step and commits",
    ),
    "no heartbeat": (
        status(unconfirmed=True),
        "unconfirmed",
        "unconfirmed: no heartbeat from its first host",
    ),
    "no scheduler": (
        status(problem="squeue did not answer\nmore"),
        "scheduler",
        "the scheduler does not answer: squeue did not answer",
    ),
    "full disk": (
        status(checkpoint_failures=FULL),
        "checkpoints",
        "checkpoints fail: no space left, last commit 40 min ago",
    ),
    "full disk from the start": (
        status(checkpoint_failures={**FULL, "last_commit_s": None}),
        "checkpoints",
        "checkpoints fail: no space left, no commit yet",
    ),
    "short lead": (
        status(timing=SLOW),
        "signal_lead",
        "Slurm warns 120 s before the time limit, but a step and a commit take 300 s: raise "
        "cluster.slurm.signal_lead_s",
    ),
    "short lead without Slurm": (
        status(timing={**SLOW, "signal_lead_s": None}),
        "running",
        "280 s a step, about 3.7 h left",
    ),
    "short limit": (
        status(incarnations=[*SHORT, incarnation(3, cause="running")]),
        "time_limit",
        "time limit too short: 2 starts in a row reached it before a commit; raise "
        "cluster.slurm.time or commit more often",
    ),
    "short limit, and resumed with another": (
        status(submission=2, incarnations=[*SHORT, incarnation(3, cause="running", submission=2)]),
        "running",
        "2 s a step, about 96 s left",
    ),
    "a commit between": (
        status(
            incarnations=[
                SHORT[0],
                {**SHORT[1], "commit": 3},
                incarnation(3, cause="running"),
            ]
        ),
        "running",
        "2 s a step, about 96 s left",
    ),
    "last link": (
        status(links_left=0, timing=timing(left_s=7200.0)),
        "last_link",
        "the last link ends in 20 min, but about 2 h of training are left; when it has ended: "
        "slurmrl resume add/1",
    ),
    "last link, long enough": (
        status(links_left=0),
        "running",
        "2 s a step, about 96 s left",
    ),
    "waits": (
        pending("Priority", "other jobs come first"),
        "pending",
        "pending for 3 h (Priority): other jobs come first",
    ),
    "waits, start known": (
        pending(
            "Resources",
            pending={
                "reason": "Resources",
                "words": "Resources",
                "since_s": 50.0,
                "expected_start": "2026-01-31T09:30:00",
            },
        ),
        "pending",
        "pending for 50 s: Resources; expected to start 2026-01-31 09:30:00",
    ),
    "waits, nothing known": (pending("", pending=None), "pending", "pending"),
    "interrupted": (
        status(state="INTERRUPTED", incarnations=[ENDED]),
        "interrupted",
        "no links left (the last one: preempted (SIGTERM), handed over at step 12); to "
        "continue: slurmrl resume add/1",
    ),
    "interrupted, rollout tasks are left": (
        status(
            state="INTERRUPTED",
            incarnations=[ENDED],
            groups=[
                {"name": "trainer", "tasks": [{"job_id": "41_1", "state": "CANCELLED"}]},
                {
                    "name": "rollout",
                    "tasks": [
                        {"job_id": "42_0", "state": "RUNNING"},
                        {"job_id": "42_1", "state": "PENDING"},
                        {"job_id": "42_2", "state": "PENDING"},
                    ],
                },
            ],
        ),
        "interrupted",
        "no links left (the last one: preempted (SIGTERM), handed over at step 12); to "
        "continue: slurmrl resume add/1, which replaces jobs that are left: rollout 42 (1 RUNNING, "
        "2 PENDING)",
    ),
    "never began": (
        status(state="INTERRUPTED", incarnations=[]),
        "interrupted",
        "no links left and no incarnation ever began; to continue: slurmrl resume add/1",
    ),
    "never submitted": (
        status(state="INTERRUPTED", submission=None, incarnations=[]),
        "not_submitted",
        "was never submitted: submit its configuration again",
    ),
    "finished": (
        ended("COMPLETED", "total_steps", step=60),
        "finished",
        "finished",
    ),
    "finished early": (
        ended("COMPLETED", "stop_when: reward > 0.9", step=31),
        "finished",
        "finished at step 31 of 60: stop_when: reward > 0.9",
    ),
    "failed": (
        ended(
            "FAILED",
            "failed twice in the same way: rank 0, loss: ValueError: x\nmore",
            traceback="Traceback",
        ),
        "failed",
        "gave up: failed twice in the same way: rank 0, loss: ValueError: x",
    ),
    "failed without a word": (ended("FAILED", None), "failed", "gave up: it failed"),
    "cancelled": (
        ended("CANCELLED", "cancelled by me"),
        "cancelled",
        "cancelled by me; to continue: slurmrl resume add/1",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_finding(case: str) -> None:
    found, code, text = CASES[case]
    assert diagnose(found)[0] == (code, text)


def test_the_rest_follows_by_urgency() -> None:
    found = diagnose(
        status(
            problem="squeue did not answer",
            waiting={**WAITING, "since_s": 2000.0},
            checkpoint_failures=FULL,
            timing=SLOW,
            links_left=0,
            warned="time limit",
        )
    )
    assert [finding.code for finding in found] == [
        *("scheduler", "waiting", "checkpoints", "signal_lead", "last_link", "stopping", "running")
    ]


def test_updates_that_were_all_skipped_come_before_the_happy_end() -> None:
    found = diagnose(ended("COMPLETED", "total_steps", skipped={"steps": 12, "model": "actor"}))
    assert [finding.code for finding in found] == ["skipped", "finished"]
    assert found[0].text == (
        "nothing was learned: all updates of the actor in the last 12 steps were skipped, because "
        "gradients were not finite"
    )


def test_unjudged_completions_come_before_the_happy_end() -> None:
    found = diagnose(ended("COMPLETED", "total_steps", unjudged={"steps": 9, "share": 0.875}))
    assert [finding.code for finding in found] == ["unjudged", "finished"]
    assert found[0].text == (
        "the reward could not judge 88% of the completions of the last 9 steps (reward_unjudged); "
        "the workers' logs say why"
    )


def test_an_ended_trial_has_one_finding() -> None:
    found = diagnose(ended("FAILED", "x", checkpoint_failures=FULL, problem="p", timing=SLOW))
    assert [finding.code for finding in found] == ["failed"]


def test_hosts_that_are_avoided_are_named_last() -> None:
    avoided = [{"host": host, "why": "python: not found"} for host in ("n3", "n4")]
    findings = diagnose(status(avoided=avoided))
    assert [finding.code for finding in findings] == ["running", "avoided"]
    assert findings[-1].text == (
        "jobs avoid n3, n4 (n3: python: not found); to use one again: slurmrl resume add/1 "
        "--include HOST"
    )
