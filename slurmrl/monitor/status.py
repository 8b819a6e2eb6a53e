"""The status of a trial as ``slurmrl status --json`` prints it.

This object is a contract: fields may be added, none is ever changed or removed. In full::

    {
      "trial": "EXPERIMENT/TRIAL",
      "state": "PENDING" | "RUNNING" | "COMPLETED" | "FAILED" | "CANCELLED" | "INTERRUPTED",
      "step": 12, "total_steps": 60,
      "incarnation": 2,                       starts of the trial's processes; 0 before the first
      "metrics": {"step": 12, "reward": 0.4, …},   the newest line of metrics.jsonl
      "checkpoint": {"step": 10, "age_s": 3.1} | null,   age by the master's clock; null: unknown
      "groups": [{
        "name": "trainer",
        "links_left": 6,                      queued successors of the present link
        "tasks": [{"job_id": "41_1", "host": "n0", "state": "RUNNING", "attempt": 1,
                   "lease_age_s": 0.4, "reason": ""}, …]
      }],
      "reason": null,                         how it ended, or why it failed
      "traceback": null,                      of the first rank that failed
      "run": "/…/EXPERIMENT/TRIAL",           the run directory
      "export": "/…/export/step-00000060",    the newest exported model; null if there is none
      "problem": "…",                         only where the scheduler could not be asked
      "unconfirmed": true                     only where the master's lease did not move
    }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slurmrl.history.record import Kind
from slurmrl.monitor.snapshot import Group, Snapshot
from slurmrl.scheduler.base import JobState, TaskState

ENDS = {Kind.FINISHED: "COMPLETED", Kind.FAILED: "FAILED", Kind.CANCELLED: "CANCELLED"}


def assemble(
    snapshot: Snapshot,
    tasks: Sequence[TaskState],
    *,
    alive: bool | None = None,
    problem: str | None = None,
) -> dict[str, Any]:
    """The documented object. ``alive``: whether the master's lease moved, None if nobody looked;
    ``problem``: why the scheduler could not be asked."""
    state = trial_state(snapshot, tasks, alive=bool(alive))
    end = snapshot.state.end
    status: dict[str, Any] = {
        "trial": snapshot.trial,
        "state": state,
        "step": _step(snapshot, state),
        "total_steps": snapshot.submission.total_steps if snapshot.submission else None,
        "incarnation": snapshot.state.incarnation,
        "metrics": dict(snapshot.metrics),
        "checkpoint": _checkpoint(snapshot, state),
        "groups": [_group(snapshot, group, tasks, state) for group in snapshot.groups],
        "reason": end.data.get("reason") if end else None,
        "traceback": (end.data.get("traceback") or None) if end else None,
        "run": str(snapshot.paths.run),
        "export": _export(snapshot),
    }
    if problem is not None:
        status["problem"] = problem
    if alive is False and (state == "RUNNING" or (problem is not None and end is None)):
        status["unconfirmed"] = True
    return status


def trial_state(snapshot: Snapshot, tasks: Sequence[TaskState], *, alive: bool) -> str:
    """The history says how a trial ended; before that the scheduler says whether it goes on, and
    where that does not know the jobs, the lease does."""
    if snapshot.state.end is not None:
        return ENDS[snapshot.state.end.kind]
    states = {task.state for task in tasks}
    if alive or JobState.RUNNING in states:
        return "RUNNING"
    return "PENDING" if JobState.PENDING in states else "INTERRUPTED"


def _step(snapshot: Snapshot, state: str) -> int:
    """What has been done: an interrupted trial goes on from its last commit, so its step is that
    of the commit."""
    end, commit = snapshot.state.end, snapshot.state.last_commit
    if end is not None and "step" in end.data:
        return int(end.data["step"])
    committed = commit.step if commit else 0
    if state in ("INTERRUPTED", "PENDING"):
        return committed
    return max(committed, int(snapshot.said.get("step", 0)))


def _export(snapshot: Snapshot) -> str | None:
    exports = snapshot.state.exports
    return str(snapshot.paths.exports / exports[-1].directory) if exports else None


def _checkpoint(snapshot: Snapshot, state: str) -> dict[str, Any] | None:
    """Only a living master can say how old a commit is; clocks are not compared."""
    commit = snapshot.state.last_commit
    if commit is None:
        return None
    said = snapshot.said.get("checkpoint") or {}
    known = state == "RUNNING" and said.get("step") == commit.step
    return {"step": commit.step, "age_s": said["age_s"] if known else None}


def _group(
    snapshot: Snapshot, group: Group, tasks: Sequence[TaskState], state: str
) -> dict[str, Any]:
    elements = [task for task in tasks if task.group == group.name]
    if group.elastic:
        links_left = 0
        rows = [_task(snapshot, group, e.element, e, state) for e in elements]
    else:
        link = present_link(elements)
        links_left = sum(e.state is JobState.PENDING and e is not link for e in elements)
        rows = [_task(snapshot, group, host, link, state) for host in range(group.hosts)]
    return {"name": group.name, "links_left": links_left, "tasks": rows}


def present_link(elements: Sequence[TaskState]) -> TaskState | None:
    """The element that a fixed group lives in: the running one, else the next that is to start,
    else the last that ran."""

    def rank(element: TaskState) -> tuple[int, int]:
        if element.state is JobState.RUNNING:
            return 3, element.element
        if element.state is JobState.PENDING:
            return 2, -element.element
        return int(element.state is not JobState.CANCELLED), element.element

    return max(elements, key=rank, default=None)


def _task(
    snapshot: Snapshot, group: Group, task: int, element: TaskState | None, state: str
) -> dict[str, Any]:
    attempt: Mapping[str, Any] = snapshot.attempts.get((group.name, task), {})
    if element is not None and attempt.get("job_id") != element.job_id:
        attempt = {}  # it belongs to an earlier link
    said = snapshot.said.get("tasks", {}).get(f"{group.name}/{task}", {})
    beats = state == "RUNNING" and said.get("attempt") == attempt.get("attempt")
    return {
        "job_id": element.job_id if element else attempt.get("job_id"),
        "host": attempt.get("host") or _host(element, 0 if group.elastic else task),
        "state": _task_state(snapshot, element, state),
        "attempt": attempt.get("attempt"),
        "lease_age_s": said.get("lease_age_s") if beats else None,
        "reason": element.reason if element else "",
    }


def _task_state(snapshot: Snapshot, element: TaskState | None, state: str) -> str:
    """The scheduler is not asked about ended trials: their tasks ended as they did."""
    if element is not None:
        return element.state.value
    return JobState.UNKNOWN.value if snapshot.state.end is None else state


def _host(element: TaskState | None, index: int) -> str | None:
    hosts = element.hosts if element else ()
    return hosts[index] if index < len(hosts) else None
