"""Diagnosis of a trial from its status object, as one-line findings.

docs/troubleshooting.md lists the codes of the findings and a remedy for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from slurmrl.display.terminal import age, first_line, plain
from slurmrl.fsio.calls import LEAST_BYTES
from slurmrl.run.hang import COMPILING
from slurmrl.run.history.slots import END_OF_DATASET
from slurmrl.run.reports import TRAINERS

Status = Mapping[str, Any]

WAIT_S = 60.0
WAIT_STEPS = 5.0
"""A wait for ranks is reported if it exceeds WAIT_S seconds and the time of WAIT_STEPS steps."""
SILENT_S = 180.0
"""Seconds without output of its processes after which a running job is reported."""
SHORT_LIMITS = 2
"""Number of jobs in a row that must reach their time limit without a commit to be reported."""


ACTIVE = ("RUNNING", "PENDING")
"""States of jobs that Slurm has not ended."""


class StatusFinding(NamedTuple):
    code: str
    text: str


def with_findings(status: dict[str, Any]) -> dict[str, Any]:
    """Return a status object completed by ``diagnosis`` and ``findings``."""
    findings = diagnose(status)
    described = [finding._asdict() for finding in findings]
    return {**status, "diagnosis": findings[0].text, "findings": described}


def diagnose(status: Status) -> list[StatusFinding]:
    """Return all findings, the most urgent first; never empty.

    ``status`` is the object of `watch.status` without ``diagnosis`` and ``findings``.
    """
    skipped = [*_skipped(status), *_unscored(status)]
    if status["state"] == "COMPLETED":
        return [*skipped, _ended(status)]
    if status["state"] in ("FAILED", "CANCELLED"):
        return [_ended(status), *skipped]
    found = [
        *_problem(status),
        *_full(status),
        *_failed_starts(status),
        *skipped,
        *_short_limit(status),
    ]
    if status["state"] == "INTERRUPTED":
        return [*found, _interrupted(status), *_avoided(status)]
    if status["state"] == "PENDING":
        return [*found, _pending(status), *_avoided(status)]
    found += [
        *_waiting(status),
        *_compiling(status),
        *_no_rollouts(status),
        *_checkpoints(status),
        *_lead(status),
    ]
    found += [*_last_link(status), *_warned(status), _now(status)]
    return [*found, *_avoided(status)]


def _ended(status: Status) -> StatusFinding:
    trial, reason = status["trial"], first_line(status["reason"])
    if status["state"] == "COMPLETED":
        return StatusFinding("finished", f"finished{_early(status, reason)}")
    if status["state"] == "CANCELLED":
        return StatusFinding(
            "cancelled", f"{reason or 'cancelled'}; to continue: slurmrl resume {trial}"
        )
    return StatusFinding("failed", f"gave up: {reason or 'it failed'}")


def _early(status: Status, reason: str) -> str:
    if reason in ("", "total_steps", END_OF_DATASET):
        return ""
    return f" at step {status['step']} of {status['total_steps']}: {reason}"


def _problem(status: Status) -> Iterator[StatusFinding]:
    if status.get("problem"):
        text = f"the scheduler does not answer: {first_line(status['problem'])}"
        yield StatusFinding("scheduler", text)
    if status.get("unconfirmed"):
        tasks = [task for group in status["groups"] for task in group["tasks"] if task["reason"]]
        why = [f"; job {t['job_id']}: {t['reason']}" for t in tasks if t["state"] == "RUNNING"][:1]
        text = "unconfirmed: no heartbeat from its first host"
        yield StatusFinding("unconfirmed", "".join([text, *why]))


def _skipped(status: Status) -> Iterator[StatusFinding]:
    if (skipped := status["skipped"]) is not None:
        whose = f" of the {skipped['model']}" if skipped["model"] else ""
        last = f"{skipped['steps']} steps" if skipped["steps"] > 1 else "step"
        text = (
            f"the model did not change: all updates{whose} in the last {last} were skipped, "
            "because gradients were not finite"
        )
        yield StatusFinding("skipped", text)


def _unscored(status: Status) -> Iterator[StatusFinding]:
    if (unscored := status["unjudged"]) is not None:
        steps = unscored["steps"]
        last = f"{steps} steps" if steps > 1 else "step"
        text = (
            f"the reward could not score {unscored['share']:.0%} of the completions of the last "
            f"{last} (reward_unjudged); the workers' logs say why"
        )
        yield StatusFinding("unjudged", text)


def _failed_starts(status: Status) -> Iterator[StatusFinding]:
    if (failed := status["failed_starts"]) is not None:
        where = f" on {failed['host']}" if failed["host"] else ""
        count = failed["count"]
        starts = f"{count} starts in a row" if count > 1 else "the last start"
        text = f"{starts} failed before an incarnation began" + ("; the last" if count > 1 else "")
        yield StatusFinding("failed_starts", f"{text}{where}: {plain(failed['why'])[-200:]}")


def _avoided(status: Status) -> Iterator[StatusFinding]:
    hosts = [one["host"] for one in status["avoided"]]
    if hosts:
        named = ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if hosts[8:] else "")
        why = plain(status["avoided"][0]["why"])[-120:]
        text = f"jobs exclude {named} ({hosts[0]}: {why})"
        undo = f"to use a host again: slurmrl resume {status['trial']} --include HOST"
        yield StatusFinding("avoided", f"{text}; {undo}")


def _full(status: Status) -> Iterator[StatusFinding]:
    free = status["free_bytes"]
    if free is not None and free < LEAST_BYTES:
        ended = status["state"] == "INTERRUPTED"
        go_on = f", then slurmrl resume {status['trial']}" if ended else ""
        never = "" if status["incarnations"] else ", so no link can have started"
        text = (
            f"the file system of {status['run']} is full: {free >> 20} MiB are left{never}; "
            f"free some space{go_on}"
        )
        yield StatusFinding("disk_full", text)


def _interrupted(status: Status) -> StatusFinding:
    again = f"to continue: slurmrl resume {status['trial']}"
    if status["submission"] is None:
        return StatusFinding("not_submitted", "was never submitted: submit its configuration again")
    if left := ", ".join(_jobs_left(status)):
        again += f", which replaces the remaining jobs: {left}"
    by = status.get("stopped_by")
    left = "its jobs are unknown" if status.get("problem") else "no links left"
    why = f"stopped by {plain(by)}" if by else left
    if not status["incarnations"]:
        return StatusFinding("interrupted", f"{why} and no incarnation ever began; {again}")
    last = status["incarnations"][-1]["how"]
    return StatusFinding("interrupted", f"{why} (last incarnation: {last}); {again}")


def _jobs_left(status: Status) -> Iterator[str]:
    """Yield ``rollout 42 (3 RUNNING, 21 PENDING)`` for each group of tasks that still has jobs."""
    for group in (group for group in status["groups"] if group["name"] != TRAINERS):
        states = [task["state"] for task in group["tasks"]]
        counts = [f"{states.count(state)} {state}" for state in ACTIVE if state in states]
        jobs = {t["job_id"].partition("_")[0] for t in group["tasks"] if t["state"] in ACTIVE}
        if counts:
            yield f"{group['name']} {', '.join(sorted(jobs))} ({', '.join(counts)})"


def _pending(status: Status) -> StatusFinding:
    if submitting := status.get("submitting"):
        return StatusFinding("submitting", f"being submitted {plain(submitting)}")
    pending = status["pending"] or {}
    since_s, reason, words = (pending.get(key) for key in ("since_s", "reason", "words"))
    since = f" for {age(since_s)}" if since_s is not None else ""
    named = f" ({reason})" if reason and words and words != reason else ""
    why = f": {words or reason}" if words or reason else ""
    expected = pending.get("expected_start")
    start = f"; expected to start {expected.replace('T', ' ')}" if expected else ""
    return StatusFinding("pending", f"pending{since}{named}{why}{start}")


def _short_limit(status: Status) -> Iterator[StatusFinding]:
    ended = [
        one
        for one in status["incarnations"]
        if one["cause"] != "running" and one["submission"] in (None, status["submission"])
    ]
    newest = ended[-SHORT_LIMITS:]
    if len(newest) == SHORT_LIMITS and all(
        one["cause"] == "time_limit" and one["commit"] is None for one in newest
    ):
        text = (
            f"time limit too short: {SHORT_LIMITS} starts in a row reached it before a commit; "
            "raise cluster.slurm.time or commit more often"
        )
        yield StatusFinding("time_limit", text)


def _waiting(status: Status) -> Iterator[StatusFinding]:
    waiting = status["waiting"]
    if waiting is None:
        return
    usual_s = WAIT_STEPS * (status["timing"]["step_s"] or 0.0)
    if waiting["since_s"] > max(WAIT_S, usual_s):
        explained = f": {waiting['explained']}" if waiting.get("explained") else ""
        text = f"has been waiting {age(waiting['since_s'])} for {whom(waiting)}{explained}"
        yield StatusFinding("waiting", text)


def _compiling(status: Status) -> Iterator[StatusFinding]:
    busy = [one for one in status.get("doing", ()) if one["phase"] == COMPILING]
    if busy:
        ranks = ", ".join(
            " ".join([*filter(None, [one.get("world")]), one["ranks"]]) for one in busy
        )
        text = f"{COMPILING}: 20 to 90 s (ranks {ranks})"
        yield StatusFinding("compiling", text)


def whom(waiting: Mapping[str, Any]) -> str:
    """Describe a wait, for example ``ranks 0, 3 (n1) to finish train_step of step 4``.

    If the master does not wait for ranks, return only the object of the wait.
    """
    ranks = waiting["for"]
    if not ranks:
        return str(waiting["what"])
    if 1 < len(ranks) == waiting.get("of"):
        return f"all {len(ranks)} ranks {waiting['what']}"
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if ranks[8:] else "")
    hosts = waiting.get("hosts") or []
    where = f" ({', '.join(hosts[:4])}{' …' if hosts[4:] else ''})" if hosts else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{where} {waiting['what']}"


def _no_rollouts(status: Status) -> Iterator[StatusFinding]:
    """Report that the trainers wait and no rollout task works."""
    rollouts = status["rollouts"]
    if rollouts is None or not rollouts["waits_for"]:
        return
    if any(task["host"] and task["state"] != "leaving" for task in rollouts["tasks"]):
        return
    if rollouts["wanted"] == 0:
        text = f"generation is paused; to continue: slurmrl scale {status['trial']} N"
        yield StatusFinding("rollouts", text)
        return
    groups = (group for group in status["groups"] if group["name"] != TRAINERS)
    tasks = [task for group in groups for task in group["tasks"] if task["reason"]]
    waiting = {task["reason"] for task in tasks if task["state"] == "PENDING"}
    ended = [task for task in tasks if task["state"] not in (*ACTIVE, "COMPLETED")]
    why = f" ({', '.join(sorted(waiting))})" if waiting else ""
    text = f"the trainers wait {plain(rollouts['waits_for'])}: no task runs{why}"
    if failed := rollouts["failed"]:
        host = f" on {failed['host']}" if failed["host"] else ""
        text += f"; the last task ({failed['task']}{host}) failed: {failed['why']}"
    elif ended:
        text += f"; the last task: job {ended[-1]['job_id']} {ended[-1]['reason']}"
    yield StatusFinding("rollouts", text)


def _checkpoints(status: Status) -> Iterator[StatusFinding]:
    failed = status["checkpoint_failures"]
    if failed is None:
        return
    ago = age(failed["last_commit_s"])
    last = f"last commit {ago} ago" if ago else "no commit yet"
    yield StatusFinding("checkpoints", f"checkpoints fail: {first_line(failed['reason'])}, {last}")


def _lead(status: Status) -> Iterator[StatusFinding]:
    timing = status["timing"]
    lead_s, step_s = timing["signal_lead_s"], timing["step_s"]
    if lead_s is None or step_s is None:
        return
    needed_s = step_s + (timing["commit_s"] or 0.0)
    if needed_s > lead_s:
        text = (
            f"Slurm warns {lead_s:.0f} s before the time limit, but a step and a commit take "
            f"{needed_s:.0f} s: raise cluster.slurm.signal_lead_s"
        )
        yield StatusFinding("signal_lead", text)


def _last_link(status: Status) -> Iterator[StatusFinding]:
    link, left_s = status["link"], status["timing"]["left_s"]
    if status["links_left"] or link is None or link["time_left_s"] is None or left_s is None:
        return
    if left_s > link["time_left_s"]:
        text = (
            f"the last link ends in {age(link['time_left_s'])}, but about {age(left_s)} of "
            f"training are left; when it has ended: slurmrl resume {status['trial']}"
        )
        yield StatusFinding("last_link", text)


def _warned(status: Status) -> Iterator[StatusFinding]:
    by = status.get("stopped_by")
    why = f"stopped by {plain(by)}" if by else status["warned"]
    if why is not None:
        yield StatusFinding("stopping", f"{why}: stops at the next step and commits")


def _now(status: Status) -> StatusFinding:
    newest = status["incarnations"][-1] if status["incarnations"] else None
    if newest is None or newest["cause"] != "running":
        return _begins(status, newest)
    timing, waiting = status["timing"], status["waiting"]
    if status["phase"] != "running":
        text = f"starting, waiting for {whom(waiting)}" if waiting is not None else "starting"
        return StatusFinding("starting", text)
    parts = []
    if timing["step_s"] is not None:
        parts.append(f"{timing['step_s']:.3g} s a step")
    if timing["left_s"]:
        parts.append(f"about {age(timing['left_s'])} left")
    return StatusFinding("running", ", ".join(parts) or "running")


def _begins(status: Status, last: Mapping[str, Any] | None) -> StatusFinding:
    """Report that a job runs, but no incarnation has begun in it."""
    ran_s = (status["link"] or {}).get("runs_s")
    since = f" {age(ran_s)} ago" if ran_s is not None else ""
    quiet = f"its job started{since}, but its processes have reported nothing yet"
    look = f"; see slurmrl logs {status['trial']}" if (ran_s or 0.0) > SILENT_S else ""
    if last is None:
        return StatusFinding("starting", f"starting: {quiet}{look}")
    return StatusFinding(
        "restarting", f"restarting after: {last['how']}{look and f'; {quiet}{look}'}"
    )
