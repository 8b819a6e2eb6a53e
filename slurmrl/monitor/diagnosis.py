"""What is to be said about a trial in one line, from its status object. Pure functions.

docs/status.md lists the codes and what to do about each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from slurmrl.monitor.words import age, first_line

Status = Mapping[str, Any]

WAIT_S = 60.0
WAIT_STEPS = 5.0
"""Ranks are waited for unusually long after this many seconds and this many steps' time."""
SHORT_LIMITS = 2
"""Jobs in a row that reached their time limit without a commit."""


class Finding(NamedTuple):
    code: str
    text: str


def diagnose(status: Status) -> list[Finding]:
    """All that is to be said, the most urgent first; never empty. ``status`` is the documented
    object without ``diagnosis`` and ``findings``."""
    if status["state"] in ("COMPLETED", "FAILED", "CANCELLED"):
        return [_ended(status)]
    found = [*_problem(status), *_short_limit(status)]
    if status["state"] == "INTERRUPTED":
        return [*found, _interrupted(status)]
    if status["state"] == "PENDING":
        return [*found, _pending(status)]
    found += [*_restarting(status), *_waiting(status), *_checkpoints(status), *_lead(status)]
    return [*found, *_last_link(status), *_warned(status), _running(status)]


def _ended(status: Status) -> Finding:
    step, trial, reason = _steps(status), status["trial"], first_line(status["reason"])
    if status["state"] == "COMPLETED":
        why = "" if reason in ("", "total_steps") else f" ({reason})"
        return Finding("finished", f"finished at {step}{why}")
    if status["state"] == "CANCELLED":
        why = reason or "cancelled"
        return Finding("cancelled", f"{why} at {step}; slurmrl resume {trial} goes on")
    below = ", see below" if status["traceback"] else ""
    return Finding("failed", f"stopped: {reason or 'it failed'}{below}")


def _problem(status: Status) -> Iterator[Finding]:
    if status.get("problem"):
        text = f"the scheduler does not answer: {first_line(status['problem'])}"
        yield Finding("scheduler", text)
    if status.get("unconfirmed"):
        yield Finding("unconfirmed", "unconfirmed: no heartbeat of its first host was seen")


def _interrupted(status: Status) -> Finding:
    trial = status["trial"]
    again = f"slurmrl resume {trial}"
    if status["total_steps"] is None:
        return Finding("not_submitted", "was never submitted; submit its configuration again")
    if not status["incarnations"]:
        return Finding("interrupted", f"interrupted before it began: no links left; {again}")
    last = status["incarnations"][-1]["how"]
    return Finding("interrupted", f"interrupted: no links left; {again} (last: {last})")


def _pending(status: Status) -> Finding:
    pending = status["pending"] or {}
    since = f" since {age(pending['since_s'])}" if pending.get("since_s") is not None else ""
    reason, words = pending.get("reason"), pending.get("words")
    why = f"{reason} - {words}" if reason and words and words != reason else reason or words
    expected = pending.get("expected_start")
    start = f"; expected to start {expected.replace('T', ' ')}" if expected else ""
    return Finding("pending", f"pends{since}{f': {why}' if why else ''}{start}")


def _short_limit(status: Status) -> Iterator[Finding]:
    ended = [one for one in status["incarnations"] if one["cause"] != "running"]
    newest = ended[-SHORT_LIMITS:]
    if len(newest) == SHORT_LIMITS and all(
        one["cause"] == "time_limit" and one["commit"] is None for one in newest
    ):
        text = (
            f"time limit too short: {SHORT_LIMITS} starts in a row reached it before a commit; "
            "raise cluster.slurm.time or commit more often"
        )
        yield Finding("time_limit", text)


def _restarting(status: Status) -> Iterator[Finding]:
    newest = status["incarnations"][-1] if status["incarnations"] else None
    if newest is not None and newest["cause"] != "running":
        yield Finding("restarting", f"starts again after: {newest['how']}")


def _waiting(status: Status) -> Iterator[Finding]:
    waiting = status["waiting"]
    if waiting is None:
        return
    usual_s = WAIT_STEPS * (status["timing"]["step_s"] or 0.0)
    if waiting["since_s"] > max(WAIT_S, usual_s):
        yield Finding("waiting", f"waits since {age(waiting['since_s'])} for {whom(waiting)}")


def whom(waiting: Mapping[str, Any]) -> str:
    """``ranks 0, 3 (n1) to finish train_step of step 4``"""
    ranks = waiting["for"]
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if ranks[8:] else "")
    hosts = waiting.get("hosts") or []
    where = f" ({', '.join(hosts[:4])}{' …' if hosts[4:] else ''})" if hosts else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{where} {waiting['what']}"


def _checkpoints(status: Status) -> Iterator[Finding]:
    failed = status["checkpoint_failures"]
    if failed is None:
        return
    ago = age(failed["last_commit_s"])
    last = f"last commit {ago} ago" if ago else "no commit yet"
    yield Finding("checkpoints", f"checkpoints fail: {first_line(failed['reason'])}, {last}")


def _lead(status: Status) -> Iterator[Finding]:
    timing = status["timing"]
    lead_s, step_s = timing["signal_lead_s"], timing["step_s"]
    if lead_s is None or step_s is None:
        return
    needed_s = step_s + (timing["commit_s"] or 0.0)
    if needed_s > lead_s:
        text = (
            f"the warning comes {lead_s:.0f} s before the limit but a step and a commit take "
            f"{needed_s:.0f} s: raise cluster.slurm.signal_lead_s"
        )
        yield Finding("signal_lead", text)


def _last_link(status: Status) -> Iterator[Finding]:
    link, left_s = status["link"], status["timing"]["left_s"]
    if status["links_left"] or link is None or link["time_left_s"] is None or left_s is None:
        return
    if left_s > link["time_left_s"]:
        text = (
            f"this is the last link: it ends in {age(link['time_left_s'])}, about {age(left_s)} "
            f"of training are left; then slurmrl resume {status['trial']}"
        )
        yield Finding("last_link", text)


def _warned(status: Status) -> Iterator[Finding]:
    if status["warned"] is not None:
        yield Finding("stopping", f"stops at the next step and commits: {status['warned']}")


def _running(status: Status) -> Finding:
    timing, waiting = status["timing"], status["waiting"]
    if status["phase"] != "running":
        text = f"starting, waits for {whom(waiting)}" if waiting is not None else "starting"
        return Finding("starting", text)
    parts = [f"running, {_steps(status)}"]
    if timing["step_s"] is not None:
        parts.append(f"{timing['step_s']:.3g} s a step")
    if timing["left_s"]:
        parts.append(f"about {age(timing['left_s'])} left")
    return Finding("running", ", ".join(parts))


def _steps(status: Status) -> str:
    total = status["total_steps"]
    return f"step {status['step']}" + (f" of {total}" if total is not None else "")
