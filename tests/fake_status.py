"""Status objects (see ``slurmrl.watch.status``) for tests of their use."""

from __future__ import annotations

from typing import Any


def status(**changes: Any) -> dict[str, Any]:
    """Return the status of a trial that runs normally in its second link."""
    task = {
        "job_id": "41_1",
        "host": "n0",
        "state": "RUNNING",
        "attempt": 1,
        "lease_age_s": 0.4,
        "reason": "",
    }
    base = {
        "trial": "add/1",
        "state": "RUNNING",
        "step": 12,
        "total_steps": 60,
        "incarnation": 2,
        "metrics": {"step": 12, "reward": 0.41234567, "tokens_per_s": 1234.5, "time/total": 2.0},
        "checkpoint": {"step": 10, "age_s": 200.0},
        "groups": [{"name": "trainer", "links_left": 6, "tasks": [task]}],
        "reason": None,
        "traceback": None,
        "run": "/runs/me/add/1",
        "export": None,
        "results": None,
        "report": None,
        "diagnosis": "2 s a step, about 96 s left",
        "findings": [{"code": "running", "text": "2 s a step, about 96 s left"}],
        "phase": "running",
        "warned": None,
        "waiting": None,
        "rollouts": None,
        "links_left": 6,
        "link": {"job_id": "41_1", "time_left_s": 1200.0, "runs_s": 40.0},
        "pending": None,
        "checkpoint_failures": None,
        "skipped": None,
        "unjudged": None,
        "timing": {
            "step_s": 2.0,
            "left_s": 96.0,
            "start_s": 14.0,
            "commit_s": 1.2,
            "commit_stall_s": 0.1,
            "signal_lead_s": 120.0,
            "effective_ratio": 0.931,
        },
        "submission": 1,
        "submitted": 1_000_000.0,
        "avoided": [],
        "failed_starts": None,
        "free_bytes": 10**12,
        "incarnations": [
            incarnation(
                1, cause="died", how="rank 3 on n1 died: SIGKILL", job_id="41_0", lost_steps=2
            ),
            incarnation(2, cause="running", how="running", from_step=10, commit=None),
        ],
    }
    return {**base, **changes}


def timing(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = status()["timing"]
    return {**found, **changes}


def incarnation(number: int, **changes: Any) -> dict[str, Any]:
    base = {
        "number": number,
        "job_id": "41_1",
        "submission": 1,
        "link": 0,
        "hosts": ["n0", "n1"],
        "began": 1767225600.0,
        "from_step": 0,
        "to_step": 12,
        "lost_steps": 0,
        "commit": 10,
        "cause": "died",
        "how": "",
        "seconds": 200.0,
    }
    return {**base, **changes}


def pending(reason: str, words: str = "", **changes: Any) -> dict[str, Any]:
    """Return the status of a trial whose first link is queued."""
    text = f"pending for 3 h ({reason}): {words}"
    one = status(
        state="PENDING",
        step=0,
        checkpoint=None,
        metrics={},
        incarnation=0,
        link=None,
        phase=None,
        incarnations=[],
        pending={"reason": reason, "words": words, "since_s": 10800.0, "expected_start": None},
        diagnosis=text,
        findings=[{"code": "pending", "text": text}],
        timing=timing(step_s=None, left_s=None, effective_ratio=None),
    )
    one["groups"][0]["tasks"][0].update(
        state="PENDING", reason=reason, host=None, attempt=None, lease_age_s=None
    )
    return {**one, **changes}


def rollouts(**changes: Any) -> dict[str, Any]:
    """Return the status of two of four rollout tasks; one of the two has just started."""
    works = {
        "task": "rollout/0",
        "attempt": 1,
        "host": "n7",
        "state": "works",
        "version": "12.2",
        "problem": "",
        "leased": 4,
        "tokens_per_s": 812.4,
        "silent_s": 0.3,
    }
    starts = {
        "task": "rollout/3",
        "attempt": 0,
        "host": "",
        "state": "starting",
        "version": "",
        "problem": "",
    }
    base = {
        "wanted": 4,
        "waits_for": "for groups of rollout tasks: 3 of 8",
        "tasks": [works, {**starts, "leased": 0, "tokens_per_s": None, "silent_s": 9.0}],
        "trained": {"0": 80, "1": 16},
        "finished": {"0": 3},
        "dropped": {"stale": 2},
        "failed": None,
        "refused": {"late": 1, "rolled back": 1},
        "damaged": 1,
        "aborted": 0,
        "given_back": 5,
        "lost": 2,
    }
    return {**base, **changes}
