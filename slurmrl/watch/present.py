"""The current state of a trial: its waits, its pace and the remaining time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from itertools import takewhile
from typing import Any

from slurmrl.display.terminal import first_line
from slurmrl.run import hang, metrics, reports
from slurmrl.run.events import Event
from slurmrl.run.reports import RolloutTaskView
from slurmrl.scheduler.base import JobState, TaskState
from slurmrl.watch import incarnation_rows, published
from slurmrl.watch.snapshot import Traces, TrialSnapshot

SKIPPED_STEPS = 3
"""Minimum number of steps in a row without an update that is reported while a trial runs."""
UNSCORED_STEPS = 20
MOST_UNSCORED = 0.1
"""Minimum share of unscored completions that is reported."""
RECENT = 20
"""Number of newest steps over which the pace is averaged."""
RECENT_COMMITS = 5


def describe(
    snapshot: TrialSnapshot, tasks: Sequence[TaskState], status: Mapping[str, Any]
) -> dict[str, Any]:
    """Return fields of the status object. ``status`` has the state, step and incarnations."""
    state, told = status["state"], status["incarnations"]
    lives = bool(told) and told[-1]["cause"] == "running"
    newest = snapshot.incarnations[-1] if snapshot.incarnations else None
    return {
        "phase": snapshot.said.get("phase") if lives or snapshot.state.end else None,
        "warned": incarnation_rows.warning(newest.warned)
        if lives and newest and newest.warned
        else None,
        "waiting": _waiting(snapshot) if lives else None,
        "doing": list(snapshot.said.get("doing", [])) if lives else [],
        "rollouts": _rollouts(snapshot) if lives else None,
        "link": _link(tasks, snapshot.now) if state == "RUNNING" else None,
        "pending": _pending(snapshot, tasks) if state == "PENDING" else None,
        "checkpoint_failures": _failed_commits(snapshot, newest) if newest else None,
        "skipped": _skipped(snapshot),
        "unjudged": _unscored(snapshot),
        "timing": _timing(snapshot, state, status["step"]),
    }


def _waiting(snapshot: TrialSnapshot) -> dict[str, Any] | None:
    """Return the wait of the master, with the hosts of the awaited ranks."""
    said = snapshot.said.get("waiting")
    group = snapshot.trainers
    if not said or not said.get("for") or group is None:
        return None
    places = [f"{group.name}/{rank // group.workers_per_host}" for rank in said["for"]]
    tasks = snapshot.said.get("tasks", {})
    hosts = [tasks[place]["host"] for place in places if place in tasks]
    ranks = group.hosts * group.workers_per_host
    explained = hang.explain(published.doing(snapshot.said))
    return {**said, "hosts": list(dict.fromkeys(hosts)), "of": ranks, "explained": explained}


def _rollouts(snapshot: TrialSnapshot) -> dict[str, Any] | None:
    view = published.rollouts(snapshot.said)
    if view is None:
        return None
    return {**asdict(view), "tasks": list(map(_at, view.tasks)), "failed": _failed(snapshot)}


def _failed(snapshot: TrialSnapshot) -> dict[str, Any] | None:
    """Return the newest failure of a rollout task."""
    if not snapshot.task_failures:
        return None
    (group, task), (_, failure) = max(snapshot.task_failures.items(), key=lambda one: one[0])
    words = reports.attempt_failure_words(failure)
    return {"task": f"{group}/{task}", "host": failure.host or "", "why": words}


def _at(task: RolloutTaskView) -> dict[str, Any]:
    """Return the current state of a rollout task. The pace is the mean since the task's start."""
    seconds = task.counts.get("seconds", 0.0)
    return {
        "task": task.task,
        "attempt": task.attempt,
        "host": task.host,
        "state": task.state,
        "version": task.version,
        "problem": first_line(task.problem),
        "leased": task.leased,
        "tokens_per_s": task.counts.get("tokens", 0.0) / seconds if seconds else None,
        "silent_s": task.silent_s,
    }


def _link(tasks: Sequence[TaskState], now: float) -> dict[str, Any] | None:
    running = next((task for task in tasks if task.state is JobState.RUNNING), None)
    if running is None:
        return None
    return {
        "job_id": running.job_id,
        "time_left_s": running.time_left_s,
        "runs_s": _age_s(running.start, now),
    }


def _age_s(start: str, now: float) -> float | None:
    """Return the age of a local time in the scheduler's format, in seconds; None for no time."""
    try:
        return max(now - datetime.fromisoformat(start).timestamp(), 0.0)
    except (ValueError, OverflowError):
        return None


def _pending(snapshot: TrialSnapshot, tasks: Sequence[TaskState]) -> dict[str, Any] | None:
    waiting = [task for task in tasks if task.state is JobState.PENDING]
    if not waiting:  # sbatch has not queued the job yet.
        return None
    task = min(waiting, key=lambda one: one.element)
    submission = snapshot.submission
    since = [submission.time] if submission is not None and submission.time is not None else []
    if snapshot.incarnations:
        since.append(incarnation_rows.last_word(snapshot.incarnations[-1]))
    return {
        "reason": task.reason,
        "words": task.words or task.reason,
        "since_s": max(snapshot.now - max(since), 0.0) if since else None,
        "expected_start": task.start or None,
    }


def _failed_commits(snapshot: TrialSnapshot, newest: Traces) -> dict[str, Any] | None:
    kinds = [event["kind"] for event in newest.master]
    after = len(kinds) - kinds[::-1].index("commit") if "commit" in kinds else 0
    failed = [event for event in newest.master[after:] if event["kind"] == "checkpoint_failed"]
    said = snapshot.said.get("checkpoint_failed")
    failed = failed or ([said] if said else [])  # A full disk may have prevented the events.
    if not failed:
        return None
    commits = [one.begun.commit for one in snapshot.incarnations if one.begun.commit]
    return {
        "count": len(failed),
        "step": failed[-1].get("step"),
        "reason": str(failed[-1].get("reason", "")),
        "last_commit_s": max(snapshot.now - commits[-1].time, 0.0) if commits else None,
    }


def _skipped(snapshot: TrialSnapshot) -> dict[str, Any] | None:
    """Return the number of newest steps in a row without any update of a model, and the model.

    Return None for fewer than SKIPPED_STEPS steps, unless an ended trial has no other steps.
    """
    trained = [line for line in snapshot.lines if _models(line)]
    names = sorted({name for line in trained for name in _models(line)})
    runs = [(len(list(takewhile(partial(_in_vain, name), trained[::-1]))), name) for name in names]
    longest, model = max(runs, default=(0, ""))
    ended_so = snapshot.state.end is not None and longest == len(trained)
    if not longest or (longest < SKIPPED_STEPS and not ended_so):
        return None
    return {"steps": longest, "model": model}


def _unscored(snapshot: TrialSnapshot) -> dict[str, Any] | None:
    """Return the share of completions of the newest steps that the reward could not score.

    Return None for a share below MOST_UNSCORED.
    """
    given = [line.get("reward_unjudged") for line in snapshot.lines[-UNSCORED_STEPS:]]
    shares = [float(share) for share in given if isinstance(share, int | float)]
    if not shares or sum(shares) < MOST_UNSCORED * len(shares):
        return None
    return {"steps": len(shares), "share": sum(shares) / len(shares)}


def _models(line: Mapping[str, Any]) -> list[str]:
    """Return the models whose skipped updates a line counts (``actor`` for ``actor_skipped``).

    The name of the model of SFT is empty.
    """
    counted = (name for name in line if name == "skipped" or name.endswith("_skipped"))
    return [name.removesuffix("skipped").removesuffix("_") for name in counted]


def _in_vain(model: str, line: Mapping[str, Any]) -> bool:
    """Return whether the engine skipped all updates of a step because gradients were not finite."""
    prefix = f"{model}_" if model else ""
    skipped, updates = line.get(f"{prefix}skipped"), line.get(f"{prefix}updates", 1)
    numbers = isinstance(skipped, int | float) and isinstance(updates, int | float)
    return numbers and 0 < updates <= skipped


def _timing(snapshot: TrialSnapshot, state: str, step: int) -> dict[str, Any]:
    """Return the field ``timing`` of the status object."""
    events = [event for traces in snapshot.incarnations for event in traces.master]
    newest = snapshot.incarnations[-1] if snapshot.incarnations else None
    step_s = step_time_s(snapshot.lines, events)
    total = snapshot.total_steps
    commit_s, stall_s = commit_times(events)
    trained_s = counted_time_s(snapshot.trained_s, snapshot.lines, step)
    return {
        "step_s": step_s,
        "left_s": time_left_s(step_s, step, total) if not snapshot.state.end else None,
        "start_s": start_time_s(newest.begun.time, newest.master) if newest else None,
        "commit_s": commit_s,
        "commit_stall_s": stall_s,
        "signal_lead_s": snapshot.submission.signal_lead_s if snapshot.submission else None,
        "effective_ratio": effective_ratio(
            trained_s, snapshot.first_step_at, _until(snapshot, state)
        ),
    }


def _until(snapshot: TrialSnapshot, state: str) -> float | None:
    """Return the time of the last known activity in seconds since the epoch, by a host's clock."""
    if snapshot.state.end is not None:
        return snapshot.state.end.time
    if state == "RUNNING" and "time" in snapshot.said:
        return float(snapshot.said["time"])
    if not snapshot.incarnations:
        return None
    return max(
        incarnation_rows.last_word(snapshot.incarnations[-1]), incarnation_rows.last_line(snapshot)
    )


def step_time_s(lines: Sequence[Mapping[str, Any]], events: Iterable[Event]) -> float | None:
    """Return the mean time of the newest steps in seconds, including evaluations.

    First steps of incarnations are warm-up and do not count, unless there are no other steps.
    """
    firsts = {event.get("step", -1) + 1 for event in events if event["kind"] == "ready"}
    timed = [line for line in lines if _number(line.get(metrics.STEP_S)) is not None]
    warm = [line for line in timed if line["step"] not in firsts]
    recent = (warm or timed)[-RECENT:]
    return sum(line[metrics.STEP_S] for line in recent) / len(recent) if recent else None


def time_left_s(pace_s: float | None, step: int, total: int | None) -> float | None:
    """Return the seconds until the last step at ``pace_s`` per step."""
    if pace_s is None or total is None:
        return None
    return max(total - step, 0) * pace_s


def commit_times(events: Iterable[Event]) -> tuple[float | None, float | None]:
    """Return the longest duration of the newest commits, and training's longest wait for a commit.

    Both durations are in seconds; None if unknown.
    """
    newest = [event for event in events if event["kind"] == "commit"][-RECENT_COMMITS:]
    taken = [s for event in newest if (s := _number(event.get("seconds"))) is not None]
    stalls = [s for event in newest if (s := _number(event.get("stall_s"))) is not None]
    return max(taken, default=None), max(stalls, default=None)


def start_time_s(begun: float, events: Iterable[Event]) -> float | None:
    """Return the seconds from an incarnation's begin until its ranks were ready to train."""
    ready = next((event for event in events if event["kind"] == "ready"), None)
    if ready is None:
        return None
    said = _number(ready.get("seconds"))
    return said if said is not None else max(float(ready["time"]) - begun, 0.0)


def counted_time_s(
    trained_s: float | None, lines: Sequence[Mapping[str, Any]], step: int
) -> float | None:
    """Return the total seconds of the steps up to ``step``, the trial's current step.

    Later steps are lost, but their lines remain until the next incarnation begins.
    """
    if trained_s is None:
        return None
    lost = (_number(line.get(metrics.STEP_S)) or 0.0 for line in lines if line["step"] > step)
    return trained_s - sum(lost)


def effective_ratio(
    trained_s: float | None, first_step_at: float | None, until: float | None
) -> float | None:
    """Return the share of the time until ``until`` in which the trial trained steps that count.

    The time starts when the first step could begin. Repeated steps count once. Time in the queue
    counts as lost. All times are in seconds.
    """
    if trained_s is None or first_step_at is None or until is None or until <= first_step_at:
        return None
    return min(trained_s / (until - first_step_at), 1.0)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
