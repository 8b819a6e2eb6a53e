"""Status objects (see ``slurmrl.monitor.status``) as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slurmrl.monitor.words import age, first_line

Status = Mapping[str, Any]

SHOWN = ("reward", "eval/reward", "loss", "kl", "entropy", "tokens_per_s")
"""Metrics that stand in a line of progress, where a run has them."""
HEADINGS = ("TRIAL", "STATE", "STEP", "REWARD", "EVAL", "TOKENS/S", "COMMIT", "DIAGNOSIS")
SHOWN_HOSTS = 3


def number(value: Any) -> str:
    """Four digits are enough to see what goes on."""
    if not isinstance(value, int | float):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def progress(status: Status) -> str:
    total = status["total_steps"]
    return f"{status['step']}/{total if total is not None else '?'}"


def metrics(values: Mapping[str, Any]) -> str:
    """``reward 0.41  kl 0.003  …``"""
    return "  ".join(f"{name} {number(values[name])}" for name in SHOWN if name in values)


def commit(status: Status) -> str:
    """``step 10, 3 s ago``"""
    checkpoint = status["checkpoint"]
    if checkpoint is None:
        return "none yet"
    old = age(checkpoint["age_s"])
    return f"step {checkpoint['step']}" + (f", {old} ago" if old else "")


def note(status: Status) -> str:
    """Why it failed, why it waits, or what makes the rest doubtful; one line that does not change
    with the time, may be empty."""
    if status["state"] in ("FAILED", "CANCELLED"):
        return first_line(status["reason"])
    if status.get("problem"):
        return first_line(status["problem"])
    waiting = {
        task["reason"]
        for group in status["groups"]
        for task in group["tasks"]
        if task["state"] == "PENDING" and task["reason"]
    }
    if status["state"] == "PENDING":
        return f"waits: {', '.join(sorted(waiting))}" if waiting else "waits"
    return "unconfirmed: no heartbeat seen" if status.get("unconfirmed") else ""


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def many(statuses: Sequence[Status]) -> str:
    """One line a trial."""
    return "\n".join(table([HEADINGS, *(_row(status) for status in statuses)]))


def one(status: Status) -> str:
    """Everything about one trial."""
    lines = [
        f"{status['trial']}  {status['state']}  step {progress(status)}",
        f"  {status['diagnosis']}",
        *(f"  also: {finding['text']}" for finding in status["findings"][1:]),
        f"  {metrics(status['metrics'])}".rstrip(),
        f"  commit {commit(status)}   incarnation {status['incarnation']}{ratio(status)}",
        f"  run directory {status['run']}",
    ]
    if status["export"]:
        lines.append(f"  exported model {status['export']}")
    if status["traceback"]:
        lines.append(f"\n{status['traceback'].rstrip()}")
    return "\n".join([line for line in lines if line] + _tasks(status) + story(status))


def ratio(status: Status) -> str:
    value = status["timing"]["effective_ratio"]
    return "" if value is None else f"   {value:.0%} of the time went into steps that count"


def story(status: Status) -> list[str]:
    """How each of the newest incarnations came to its end."""
    rows: list[tuple[str, ...]] = [
        ("START", "JOB", "HOSTS", "STEPS", "COMMIT", "TOOK", "HOW IT ENDED")
    ]
    for row in status["incarnations"]:
        rows.append(
            (
                str(row["number"]),
                row["job_id"] or "-",
                brief(row["hosts"]),
                f"{row['from_step']}-{row['to_step']}",
                "-" if row["commit"] is None else str(row["commit"]),
                age(row["seconds"]),
                row["how"],
            )
        )
    return ["", *table(rows)] if len(rows) > 1 else []


def brief(names: Sequence[str]) -> str:
    """``n0,n1 +6``"""
    more = f" +{len(names) - SHOWN_HOSTS}" if len(names) > SHOWN_HOSTS else ""
    return f"{','.join(names[:SHOWN_HOSTS])}{more}" or "-"


def conclusion(status: Status, again: str) -> str:
    """How a watched run ended and what to do next. ``again`` is appended to commands."""
    trial, state = status["trial"], status["state"]
    lines = [f"{trial} {state}: step {progress(status)}, last commit {commit(status)}"]
    if state == "COMPLETED":
        lines.append(f"  {metrics(status['metrics'])}")
        if status["export"]:
            lines.append(f"  exported model  {status['export']}")
    elif state in ("PENDING", "RUNNING"):
        lines.append(f"  the run goes on; slurmrl status {trial}{again} shows how")
        lines.append(f"  to end it: slurmrl cancel {trial}{again}")
    else:
        if state == "FAILED":
            lines.append(f"  {status['reason']}")
            lines += [f"  {line}" for line in (status["traceback"] or "").splitlines()]
        lines.append(f"  what happened: slurmrl logs {trial}{again}")
        lines.append(f"  to go on:      slurmrl resume {trial}{again}")
    return "\n".join(lines)


def _row(status: Status) -> tuple[str, ...]:
    values = status["metrics"]
    return (
        status["trial"],
        status["state"],
        progress(status),
        number(values.get("reward")),
        number(values.get("eval/reward")),
        number(values.get("tokens_per_s")),
        commit(status),
        status["diagnosis"],
    )


def _tasks(status: Status) -> list[str]:
    rows: list[tuple[str, ...]] = [("TASK", "JOB", "HOST", "STATE", "ATTEMPT", "HEARTBEAT", "")]
    for group in status["groups"]:
        for index, task in enumerate(group["tasks"]):
            heartbeat = age(task["lease_age_s"])
            attempt = task["attempt"]
            rows.append(
                (
                    f"{group['name']}/{index}",
                    task["job_id"] or "-",
                    task["host"] or "-",
                    task["state"],
                    "-" if attempt is None else str(attempt),
                    f"{heartbeat} ago" if heartbeat else "-",
                    task["reason"] if task["state"] != "RUNNING" else "",
                )
            )
    left = status["links_left"]
    words = [f"{left} successor{'s' if left != 1 else ''} queued"] if left else []
    link = status["link"]
    if link is not None and link["time_left_s"] is not None:
        words.insert(0, f"{age(link['time_left_s'])} left of {link['job_id']}")
    tail = [", ".join(words)] if words else []
    return ["", *table(rows), *tail] if len(rows) > 1 else tail
