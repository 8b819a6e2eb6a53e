"""The status of a trial as ``slurmrl status --json`` prints it.

This object is a contract. New versions may add fields, but never change or remove fields. In full::

    {
      "trial": "EXPERIMENT/TRIAL",
      "state": "PENDING" | "RUNNING" | "COMPLETED" | "FAILED" | "CANCELLED" | "INTERRUPTED",
      "step": 12, "total_steps": 60,
      "incarnation": 2,                       starts of the trial's processes; 0 before the first
      "metrics": {"step": 12, "reward": 0.4, …},   the newest line of metrics.jsonl
      "checkpoint": {"step": 10, "age_s": 3.1} | null,   age by the master's clock; null: unknown
      "groups": [{
        "name": "trainer",
        "links_left": 6,                      queued successors of the current link
        "tasks": [{"job_id": "41_1", "host": "n0", "state": "RUNNING", "attempt": 1,
                   "lease_age_s": 0.4, "reason": ""}, …]   the scheduler's reason, or the last
                                              error of a rollout task that has failed
      }],
      "reason": null,                         reason of the end or failure of the trial
      "traceback": null,                      traceback of the first rank that failed
      "run": "/…/EXPERIMENT/TRIAL",           the run directory
      "export": "/…/export/step-00000060",    the newest exported model; null if there is none
      "results": {"file": "/…/results.jsonl", "summary": "/…/summary.json" | null} | null,
                                              results of a finished trial that records them; null
                                              for other trials
      "report": "/…/report.html",             null if none was written
      "diagnosis": "12 s a step, about 9 min left",   the first finding, on one line
      "findings": [{"code": "running", "text": "…"}, …],   all findings, the most urgent
                                              first; never empty. Codes: docs/troubleshooting.md
      "phase": "starting" | "running" | "finished" | null,   phase of the current incarnation; null
                                              before its master reports and after it has ended
      "warned": null,                         the warning that the incarnation's job will end
      "waiting": {"for": [3], "hosts": ["n1"], "what": "to finish gen of step 3",
                  "since_s": 2.1, "of": 16,
                  "explained": "ranks 0-2 have waited 3 s in …"} | null,
                                              the ranks for which the master waited at its last
                                              report, the number of all ranks, an explanation
      "doing": [{"ranks": "0-2", "call": "actor_train", "step": 3, "phase": "forward and backward",
                 "part": 2, "parts": 8, "since_s": 4.1, "silent_s": 0.0,
                 "collective": {"name": "all_reduce", "number": 1841, "ranks": "0-3",
                                "since_s": 2.0, …} | null}, …],
                                              activity of the ranks of a running trial, one entry
                                              per activity; see run/hang.py. Entries of rollout
                                              tasks have "world": "rollout/3"
      "rollouts": {                           null without rollout tasks or a running trial
        "waits_for": "for groups of rollout tasks: 3 of 8",   wait of the trainers; empty without
        "wanted": 4,                          tasks that may run at a time
        "tasks": [{"task": "rollout/3", "attempt": 0, "host": "n7", "state": "works",
                   "version": "12.1", "leased": 4, "tokens_per_s": 812.0, "silent_s": 0.3,
                   "problem": ""}, …],        running attempts; "state": "starting" | "no weights" |
                                              "idle" | "works" | "leaving"; "tokens_per_s": mean
                                              since the start; "problem": reason why the task
                                              cannot take newer weights
        "trained": {"0": 80, "1": 16},        groups that steps trained on, by staleness in steps
        "finished": {"0": 3},                 groups that wait for a step, by staleness
        "dropped": {"stale": 2},              groups that are never trained, by reason
        "refused": {"late": 1},               rejected results, by reason
        "damaged": 0, "aborted": 0, "given_back": 4, "lost": 2,   groups that were queued again
        "failed": {"task": "rollout/2", "host": "n7", "why": "…"} | null   newest failed task
      },
      "links_left": 6,                        queued successors, over all groups and arrays
      "link": {"job_id": "41_1", "time_left_s": 1200.0, "runs_s": 40.0} | null,
                                              null unless a job runs; unknown times are null, and
                                              the first time is null without a limit
      "pending": {"reason": "Priority", "words": "…", "since_s": 40.2, "expected_start": null}
                 | null,                      null unless PENDING; the start that the scheduler
                                              expects, in its local time: "2026-01-31T09:30:00"
      "checkpoint_failures": {"count": 2, "step": 30, "reason": "…", "last_commit_s": 2400.0}
                             | null,          commits that failed since the last success
      "skipped": {"steps": 12, "model": "actor"} | null,   newest steps in a row that skipped all
                                              updates of a model ("" for SFT), because gradients
                                              were not finite; null for fewer than 3 steps
      "unjudged": {"steps": 20, "share": 0.4} | null,   share of the completions of the newest steps
                                              that the reward could not score; null below 0.1
      "timing": {
        "step_s": 12.3,                       mean of the newest steps; null before the first
        "left_s": 240.0,                      time to the last step at this pace
        "start_s": 14.0,                      time from the incarnation's begin to the first step
        "commit_s": 1.2, "commit_stall_s": 0.1,   longest recent commit and wait for it
        "signal_lead_s": 120.0,               time between Slurm's warning and the time limit
        "effective_ratio": 0.93               time of the counted steps / time since the first;
      },                                      null in lists of trials. null: unknown
      "submission": 1,                        the newest; null for a trial that never was submitted
      "submitting": "on login1, process 123" | null,   process that now submits the trial
      "stopped_by": "alice" | null,           user who has stopped the trial with ``slurmrl stop``
      "submitted": 1767225600.0 | null,       time of the submission by its host's clock
      "incarnations": [{                      the newest incarnations, oldest first: 20 of one
        "number": 2,                          trial, 3 in lists of trials
        "job_id": "41_1" | null, "submission": 1 | null, "link": 1 | null, "hosts": ["n0", …],
        "began": 1767225600.0,                time by the clock of the first host
        "from_step": 10, "to_step": 12,       step from which it continued, and last known step
        "commit": 10 | null,                  step of the incarnation's last commit
        "lost_steps": 2,                      steps after this commit that were lost
        "cause": "running" | "finished" | "cancelled" | "gave_up" | "time_limit" | "preemption" |
                 "interrupt" | "exception" | "died" | "oom" | "hung" | "deadline" | "lost_host" |
                 "gpu_fault" | "master" | "environment" | "killed" | "unknown",   or a new cause
        "how": "rank 3 on n1 died: SIGKILL",
        "seconds": 31.2                       time from its begin to its last recorded activity
      }, …],
      "avoided": [{"host": "n3", "why": "…"}, …],   hosts that jobs avoid because of failures
      "failed_starts": {"count": 2, "host": "n3", "why": "…"} | null,   newest starts in a row
                                              without an incarnation; host (empty if unknown) and
                                              reason of the newest
      "free_bytes": 123456789,                free space on the file system of the run directory,
                                              without quotas; null: unknown
      "problem": "…",                         only if the scheduler did not answer
      "unconfirmed": true                     only if the master's lease did not move
    }
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slurmrl.run import reports
from slurmrl.run.history.slots import Kind
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import TRAINERS, Identity, JobTag
from slurmrl.scheduler.base import JobState, TaskState
from slurmrl.watch import incarnation_rows, present
from slurmrl.watch.diagnosis import with_findings
from slurmrl.watch.snapshot import Group, TrialSnapshot

ENDS = {Kind.FINISHED: "COMPLETED", Kind.FAILED: "FAILED", Kind.CANCELLED: "CANCELLED"}


def assemble(
    snapshot: TrialSnapshot,
    tasks: Sequence[TaskState],
    *,
    past: Sequence[TaskState] = (),
    alive: bool | None = None,
    problem: str | None = None,
) -> dict[str, Any]:
    """Return the status object.

    ``past`` has tasks of jobs that show only the ends of incarnations. ``alive`` states whether the
    master renewed its lease; None if this was not checked. ``problem`` is the error of a scheduler
    that did not answer.
    """
    own = [task for task in tasks if task.group == TRAINERS]
    state = trial_state(snapshot, own, alive=bool(alive))
    end = snapshot.state.end
    told = incarnation_rows.rows(snapshot, own, past, state)
    lives = bool(told) and told[-1]["cause"] == "running"
    status: dict[str, Any] = {
        "trial": snapshot.trial,
        "state": state,
        "step": _step(snapshot, lives),
        "total_steps": snapshot.total_steps,
        "incarnation": snapshot.state.incarnation,
        "metrics": dict(snapshot.metrics),
        "checkpoint": _checkpoint(snapshot, lives),
        "groups": [_group(snapshot, group, tasks, state) for group in snapshot.groups],
        "reason": end.data.get("reason") if end else None,
        "traceback": (end.data.get("traceback") or None) if end else None,
        "run": str(snapshot.paths.run),
        "export": _export(snapshot),
        "results": _results(snapshot.paths),
        "report": str(snapshot.paths.report) if snapshot.paths.report.is_file() else None,
        "submission": snapshot.submission.number if snapshot.submission else None,
        "submitting": snapshot.submitting or None,
        "stopped_by": snapshot.submission.stopped_by or None if snapshot.submission else None,
        "submitted": snapshot.submission.time if snapshot.submission else None,
        "incarnations": told,
        "avoided": [{"host": one.host, "why": one.why} for one in snapshot.avoided],
        "failed_starts": _failed_starts(snapshot),
        "free_bytes": snapshot.free_bytes,
    }
    status["links_left"] = sum(group["links_left"] for group in status["groups"])
    status |= present.describe(snapshot, own, status)
    if problem is not None:
        status["problem"] = problem
    should_beat = state == "RUNNING" and _has_agent(snapshot, own)
    if alive is False and (should_beat or (problem is not None and end is None)):
        status["unconfirmed"] = True
    return with_findings(status)


def _failed_starts(snapshot: TrialSnapshot) -> dict[str, Any] | None:
    failed = snapshot.failed_starts
    if not failed:
        return None
    return {"count": len(failed), "host": failed[-1].host, "why": failed[-1].why}


def trial_state(snapshot: TrialSnapshot, tasks: Sequence[TaskState], *, alive: bool) -> str:
    """Return the state of a trial.

    An ended trial has the state in its history. Otherwise, the state depends on the trainers'
    ``tasks`` in the scheduler. A renewed lease counts as running, even if the scheduler does not
    know the jobs.
    """
    if snapshot.state.end is not None:
        return ENDS[snapshot.state.end.kind]
    states = {task.state for task in tasks}
    if alive or JobState.RUNNING in states:
        return "RUNNING"
    waits = JobState.PENDING in states or bool(snapshot.submitting)
    return "PENDING" if waits else "INTERRUPTED"


def _has_agent(snapshot: TrialSnapshot, tasks: Sequence[TaskState]) -> bool:
    """Return whether the first host of the current job has an agent, which renews a lease."""
    return _attempt(snapshot, TRAINERS, 0, present_link(tasks)) is not None


def _attempt(
    snapshot: TrialSnapshot, group: str, task: int, element: TaskState | None
) -> Identity | None:
    """Return the newest attempt of a task unless it belongs to an earlier link or start."""
    attempt = snapshot.attempts.get((group, task))
    if element is None or attempt is None:
        return attempt
    own = attempt.job_id == element.job_id and incarnation_rows.is_start_of(
        element, JobTag(attempt.job)
    )
    return attempt if own else None


def _step(snapshot: TrialSnapshot, lives: bool) -> int:
    """Return the step that the trial has reached.

    Without a running incarnation, this is the step of the last commit, because the next incarnation
    continues from there.
    """
    end, commit = snapshot.state.end, snapshot.state.last_commit
    if end is not None and "step" in end.data:
        return int(end.data["step"])
    committed = commit.step if commit else 0
    return max(committed, int(snapshot.said.get("step", 0))) if lives else committed


def _export(snapshot: TrialSnapshot) -> str | None:
    export = snapshot.state.export
    return str(snapshot.paths.exports / export.directory) if export else None


def _results(paths: RunPaths) -> dict[str, Any] | None:
    if not paths.results.is_file():
        return None
    summary = str(paths.summary) if paths.summary.is_file() else None
    return {"file": str(paths.results), "summary": summary}


def _checkpoint(snapshot: TrialSnapshot, lives: bool) -> dict[str, Any] | None:
    """Return step and age of the last commit.

    Only a running master knows the age, because clocks of hosts are not compared.
    """
    commit = snapshot.state.last_commit
    if commit is None:
        return None
    said = snapshot.said.get("checkpoint") or {}
    known = lives and said.get("step") == commit.step
    return {"step": commit.step, "age_s": said["age_s"] if known else None}


def _group(
    snapshot: TrialSnapshot, group: Group, tasks: Sequence[TaskState], state: str
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
    """Return the array element of a fixed group's current job.

    Choose the running element, else the next element to start, else the last element that ran.
    """

    def rank(element: TaskState) -> tuple[int, int]:
        if element.state is JobState.RUNNING:
            return 3, element.element
        if element.state is JobState.PENDING:
            return 2, -element.element
        return int(element.state is not JobState.CANCELLED), element.element

    return max(elements, key=rank, default=None)


def _task(
    snapshot: TrialSnapshot, group: Group, task: int, element: TaskState | None, state: str
) -> dict[str, Any]:
    attempt = _attempt(snapshot, group.name, task, element)
    said = snapshot.said.get("tasks", {}).get(f"{group.name}/{task}", {})
    number = attempt.attempt if attempt is not None else None
    host, job_id = (attempt.host, attempt.job_id) if attempt is not None else ("", "")
    beats = state == "RUNNING" and said.get("attempt") == number
    failed, failure = snapshot.task_failures.get((group.name, task), (None, None))
    own = reports.attempt_failure_words(failure) if failure and failed == number else ""
    ends = element is not None and not element.state.active
    return {
        "job_id": element.job_id if element else job_id or None,
        "host": host or _host(element, 0 if group.elastic else task),
        "state": _task_state(snapshot, element, state),
        "attempt": number,
        "lease_age_s": said.get("lease_age_s") if beats else None,
        "reason": (own if ends else "") or _reason(element),
    }


def _reason(element: TaskState | None) -> str:
    """Return why an element waits, how it failed, or its state in Slurm (suspended) if it runs."""
    if element is None:
        return ""
    silent = element.state in (JobState.PENDING, JobState.COMPLETED)
    return ("" if silent else element.words) or element.reason


def _task_state(snapshot: TrialSnapshot, element: TaskState | None, state: str) -> str:
    """Return a task's state.

    The scheduler is not queried about ended trials, so their tasks have the trial's state.
    """
    if element is not None:
        return element.state.value
    return JobState.UNKNOWN.value if snapshot.state.end is None else state


def _host(element: TaskState | None, index: int) -> str | None:
    hosts = element.hosts if element else ()
    return hosts[index] if index < len(hosts) else None
