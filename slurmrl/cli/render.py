"""Status objects (see ``slurmrl.monitor.status``) as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Status = Mapping[str, Any]

SHOWN = ("reward", "eval/reward", "loss", "kl", "entropy", "tokens_per_s")
"""Metrics that stand in a line of progress, where a run has them."""
HEADINGS = ("TRIAL", "STATE", "STEP", "REWARD", "EVAL", "TOKENS/S", "COMMIT", "NOTE")


def number(value: Any) -> str:
    """Four digits are enough to see what goes on."""
    if not isinstance(value, int | float):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def age(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


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
    """Why it failed, why it waits, or what makes the rest doubtful; one line, may be empty."""
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


def first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


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
        f"  {metrics(status['metrics'])}".rstrip(),
        f"  commit {commit(status)}   incarnation {status['incarnation']}",
        f"  run directory {status['run']}",
    ]
    if status["export"]:
        lines.append(f"  exported model {status['export']}")
    if note(status):
        lines.append(f"  {note(status)}")
    if status["traceback"]:
        lines += ["", status["traceback"].rstrip()]
    return "\n".join([line for line in lines if line] + _tasks(status))


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
        note(status),
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
                    task["reason"],
                )
            )
    links = sum(group["links_left"] for group in status["groups"])
    left = [f"{links} successor{'s' if links != 1 else ''} queued"] if links else []
    return ["", *table(rows), *left] if len(rows) > 1 else left
