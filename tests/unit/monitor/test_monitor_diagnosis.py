from __future__ import annotations

import re
from typing import Any

import pytest

from slurmrl.run import hang
from slurmrl.watch.diagnosis import diagnose
from tests.fake_status import incarnation, pending, rollouts, status, timing

SLOW = timing(step_s=280.0, commit_s=20.0, left_s=13440.0)
SHORT = [
    incarnation(number, cause="time_limit", how="time limit", commit=None) for number in (1, 2)
]
NOW = incarnation(3, cause="running")
WAITING = {"for": [3], "hosts": ["n1"], "what": "to finish gen of step 13", "since_s": 200.0}
MANY = {"for": list(range(16)), "hosts": [f"n{i}" for i in range(8)], "what": "to be ready"}
FULL = {"count": 2, "step": 30, "reason": "no space left\nmore", "last_commit_s": 2400.0}
ENDED = incarnation(2, cause="preemption", how="preempted (SIGTERM), handed over at step 12")
NONE_RUNS = rollouts(tasks=[], waits_for="for a rollout task")
FAILED_TASK = {"task": "rollout/5", "host": "n1", "why": "rank 0: ValueError: x"}
FAILED_STARTS = {"count": 3, "host": "n3", "why": "python: not found"}
COMPILES = {"ranks": "0-3", "call": "actor_gen", "phase": hang.COMPILING, "since_s": 3.0}
AT_NINE = {"reason": "Resources", "words": "Resources", "since_s": 50.0}
AT_NINE["expected_start"] = "2026-01-31T09:30:00"


def interrupted(**changes: Any) -> dict[str, Any]:
    return status(state="INTERRUPTED", **changes)


def new_job(runs_s: float) -> dict[str, Any]:
    link = {"job_id": "41_1", "time_left_s": 1200.0, "runs_s": runs_s}
    return status(incarnation=0, incarnations=[], link=link)


def group(name: str, *tasks: str, reason: str = "") -> dict[str, Any]:
    found = [{"job_id": f"42_{n}", "state": one, "reason": reason} for n, one in enumerate(tasks)]
    return {"name": name, "tasks": found}


def waits_for_tasks(reason: str, **more: Any) -> dict[str, Any]:
    return status(
        rollouts={**NONE_RUNS, **more}, groups=[group("rollout", "PENDING", reason=reason)]
    )


CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "running": (status(), "running", "2 s a step, about 96 s left"),
    "no step yet": (status(step=0, timing=timing(step_s=None, left_s=None)), "running", "running"),
    "rollout tasks work": (status(rollouts=rollouts()), "running", "2 s a step…"),
    "long steps may take long": (
        status(waiting=WAITING, timing=timing(step_s=50.0, left_s=2400.0)),
        "running",
        "50 s a step, about 40 min left",
    ),
    "short lead without Slurm": (
        status(timing={**SLOW, "signal_lead_s": None}),
        "running",
        "…about 3.7 h left",
    ),
    "short limit, and resumed with another": (
        status(submission=2, incarnations=[*SHORT, {**NOW, "submission": 2}]),
        "running",
        "2 s…",
    ),
    "a commit between": (
        status(incarnations=[SHORT[0], {**SHORT[1], "commit": 3}, NOW]),
        "running",
        "2 s…",
    ),
    "last link, long enough": (status(links_left=0), "running", "2 s…"),
    "starting": (status(phase="starting"), "starting", "starting"),
    "starting, waits for somebody": (
        status(phase="starting", waiting={**MANY, "since_s": 8.0}),
        "starting",
        "…for ranks 0, 1, 2, 3, 4, 5, 6, 7 and 8 more (n0, n1, n2, n3 …) to be ready",
    ),
    "a job has just started": (new_job(4.0), "starting", "…started 4 s ago, but its processes…"),
    "a job that says nothing": (new_job(300.0), "starting", "…; see slurmrl logs add/1"),
    "restarts": (
        status(incarnations=[incarnation(1, how="rank 3 on n1 died: SIGKILL")]),
        "restarting",
        "…after: rank 3 on n1 died: SIGKILL",
    ),
    "a host where nothing starts": (
        interrupted(incarnations=[], failed_starts=FAILED_STARTS),
        "failed_starts",
        "3 starts in a row failed…on n3: python: not found",
    ),
    "compiles": (
        status(doing=[COMPILES], waiting={**WAITING, "since_s": 2.0}),
        "compiling",
        "compiling the operators of slurmrl, once for this cache: 20 to 90 s (ranks 0-3)",
    ),
    "compiles while it starts": (status(phase="starting", doing=[COMPILES]), "compiling", "…"),
    "waits long": (status(waiting=WAITING), "waiting", "…3.3 min for rank 3 (n1) to finish gen…"),
    "waits for all": (
        status(waiting={**WAITING, "for": [0, 1], "of": 2}),
        "waiting",
        "…for all 2 ranks to finish gen of step 13",
    ),
    "no rollout task": (
        waits_for_tasks("Priority"),
        "rollouts",
        "…wait for a rollout task: no task runs (Priority)",
    ),
    "rollout tasks fail": (
        waits_for_tasks("JobArrayTaskLimit", failed=FAILED_TASK),
        "rollouts",
        "…(JobArrayTaskLimit);…(rollout/5 on n1) failed: rank 0: ValueError: x",
    ),
    "jobs of rollout tasks end": (
        status(
            rollouts=NONE_RUNS, groups=[group("rollout", "TIMEOUT", reason="reached its limit")]
        ),
        "rollouts",
        "…no task runs; the last task: job 42_0 reached its limit",
    ),
    "no rollout task is wanted": (
        status(rollouts=rollouts(tasks=[], wanted=0)),
        "rollouts",
        "…paused…slurmrl scale add/1 N",
    ),
    "warned of its end": (status(warned="time limit"), "stopping", "time limit: stops…"),
    "no heartbeat": (status(unconfirmed=True), "unconfirmed", "…no heartbeat…"),
    "no scheduler": (
        status(problem="squeue did not answer\nmore"),
        "scheduler",
        "…does not answer: squeue did not answer",
    ),
    "full disk": (
        status(checkpoint_failures=FULL),
        "checkpoints",
        "…no space left, last commit 40 min ago",
    ),
    "full disk from the start": (
        status(checkpoint_failures={**FULL, "last_commit_s": None}),
        "checkpoints",
        "…no commit yet",
    ),
    "short lead": (
        status(timing=SLOW),
        "signal_lead",
        "…120 s before…take 300 s: raise cluster.slurm.signal_lead_s",
    ),
    "short limit": (
        status(incarnations=[*SHORT, NOW]),
        "time_limit",
        "…2 starts in a row…raise cluster.slurm.time…",
    ),
    "last link": (
        status(links_left=0, timing=timing(left_s=7200.0)),
        "last_link",
        "…ends in 20 min, but about 2 h…slurmrl resume add/1",
    ),
    "waits": (
        pending("Priority", "other jobs come first"),
        "pending",
        "pending for 3 h (Priority): other jobs come first",
    ),
    "waits, start known": (
        pending("Resources", pending=AT_NINE),
        "pending",
        "…for 50 s: Resources; expected to start 2026-01-31 09:30:00",
    ),
    "waits, nothing known": (pending("", pending=None), "pending", "pending"),
    "interrupted": (
        interrupted(incarnations=[ENDED]),
        "interrupted",
        "…(last incarnation: preempted (SIGTERM), handed over…slurmrl resume add/1",
    ),
    "interrupted, rollout tasks are left": (
        interrupted(
            groups=[group("trainer", "CANCELLED"), group("rollout", "RUNNING", *["PENDING"] * 2)]
        ),
        "interrupted",
        "…slurmrl resume add/1, which replaces the remaining…rollout 42 (1 RUNNING, 2 PENDING)",
    ),
    "never began": (interrupted(incarnations=[]), "interrupted", "…no incarnation ever began…"),
    "never submitted": (
        interrupted(submission=None, incarnations=[]),
        "not_submitted",
        "…submit its configuration…",
    ),
    "finished": (
        status(state="COMPLETED", reason="total_steps", step=60),
        "finished",
        "finished",
    ),
    "finished early": (
        status(state="COMPLETED", reason="stop_when: reward > 0.9", step=31),
        "finished",
        "…at step 31 of 60: stop_when: reward > 0.9",
    ),
    "failed": (status(state="FAILED", reason="rank 0: x\nmore"), "failed", "gave up: rank 0: x"),
    "failed without a word": (status(state="FAILED"), "failed", "…it failed"),
    "cancelled": (
        status(state="CANCELLED", reason="cancelled by me"),
        "cancelled",
        "cancelled by me;…slurmrl resume add/1",
    ),
}
"""Status -> code and text of the first finding; … stands for any words."""


@pytest.mark.parametrize("case", CASES)
def test_first_finding_has_the_expected_code_and_text(case: str) -> None:
    found, code, text = CASES[case]
    first = diagnose(found)[0]
    assert first.code == code
    assert re.fullmatch(".*".join(map(re.escape, text.split("…"))), first.text)


def test_findings_are_sorted_by_urgency() -> None:
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


@pytest.mark.parametrize(
    ("code", "value", "words"),
    [
        ("skipped", {"steps": 12, "model": "actor"}, "updates of the actor in the last 12 steps"),
        ("unjudged", {"steps": 9, "share": 0.875}, "88% of the completions of the last 9 steps"),
    ],
)
def test_skipped_updates_are_shown_before_success(
    code: str, value: dict[str, Any], words: str
) -> None:
    found = diagnose(status(state="COMPLETED", reason="total_steps", **{code: value}))
    assert [finding.code for finding in found] == [code, "finished"]
    assert words in found[0].text


def test_ended_trial_has_one_finding() -> None:
    ended = status(state="FAILED", checkpoint_failures=FULL, problem="p", timing=SLOW)
    assert [finding.code for finding in diagnose(ended)] == ["failed"]


def test_excluded_hosts_are_named_last() -> None:
    avoided = [{"host": host, "why": "python: not found"} for host in ("n3", "n4")]
    findings = diagnose(status(avoided=avoided))
    assert [finding.code for finding in findings] == ["running", "avoided"]
    assert "exclude n3, n4 (n3: python: not found)" in findings[-1].text
    assert "--include HOST" in findings[-1].text
