"""Status objects (see ``slurmrl.watch.status``) as text.

``width`` is the width of the terminal; None turns wrapping off.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from slurmrl.display.terminal import age, first_line, hanging, plain, table

Status = Mapping[str, Any]

SHOWN = (
    "reward",
    "eval/reward",
    "accuracy",
    "eval/accuracy",
    "rewards/accuracies",
    "eval/rewards/accuracies",
    "loss",
    "eval/loss",
    "kl",
    "reverse_kl",
    "entropy",
    "tokens_per_s",
    "rows_left_out",
)
"""Metrics of a progress line; metrics that a run lacks are omitted."""
COLUMNS = {"REWARD": "reward", "EVAL": "eval/reward", "LOSS": "loss", "TOKENS/S": "tokens_per_s"}
"""Mapping from a column heading in a list of trials to the metric in the column."""
LIVES = ("PENDING", "RUNNING")
SHOWN_HOSTS = 3
MOST_TASKS = 8
"""Maximum number of tasks with a line each. In larger groups, hosts in one state share a line."""


def number(value: Any) -> str:
    """Return a number with four digits; ``-`` for other values."""
    if not isinstance(value, int | float):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def progress(status: Status) -> str:
    total = status["total_steps"]
    return f"{status['step']}/{total if total is not None else '?'}"


def metrics(values: Mapping[str, Any]) -> str:
    """Return the metrics of a progress line, such as ``reward 0.41  kl 0.003``."""
    estimates = dict(_estimates(values))
    alone = (name for name in shown(values) if name not in estimates)
    return "  ".join([*(f"{name} {number(values[name])}" for name in alone), *estimates.values()])


def shown(names: Collection[str]) -> list[str]:
    """Return the metrics of a progress line without intervals, including metrics of suites."""
    return [*filter(names.__contains__, SHOWN), *(n for n in names if _of_suite(n) in SHOWN)]


def _of_suite(name: str) -> str:
    """Return ``eval/reward`` for ``eval/gsm8k/reward``, the metric of a suite."""
    first, _, rest = name.partition("/")
    _, _, own = rest.partition("/")
    return f"eval/{own}" if first == "eval" and own else ""


def _estimates(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and text (``eval/pass@8 0.5 (0.31 to 0.69)``) of metrics with an interval."""
    for name in values:
        bounds = values.get(f"{name}/low"), values.get(f"{name}/high")
        if None not in bounds:
            yield name, f"{name} {number(values[name])} ({' to '.join(map(number, bounds))})"


def commit(status: Status) -> str:
    """Return the last commit, such as ``step 10, 3 s ago``."""
    checkpoint = status["checkpoint"]
    if checkpoint is None:
        return "none yet"
    old = age(checkpoint["age_s"])
    return f"step {checkpoint['step']}" + (f", {old} ago" if old else "")


def note(status: Status) -> str:
    """Return the reason why the trial failed or waits, or why its status is uncertain.

    The line may be empty. The line has no ages, so that it only changes if the reason changes.
    """
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


def many(statuses: Sequence[Status], width: int | None = None, now: float | None = None) -> str:
    """Return one line per trial, with the diagnosis below it in a narrow terminal.

    ``now`` is in seconds since the epoch.
    """
    named = {
        heading: metric
        for heading, metric in COLUMNS.items()
        if any(metric in status["metrics"] for status in statuses)
    }
    rows = [("TRIAL", "STATE", "AGE", "STEP", *named, "COMMIT")]
    now = time.time() if now is None else now
    rows += [_row(status, named.values(), now) for status in statuses]
    said = ["DIAGNOSIS", *(plain(status["diagnosis"]) for status in statuses)]
    lines = table([(*row, text) for row, text in zip(rows, said, strict=True)])
    if width is None or max(map(len, lines)) <= width:
        return "\n".join(lines)
    heads = table(rows)
    below = [[], *(hanging("    ", text, width) for text in said[1:])]
    return "\n".join(
        line for head, more in zip(heads, below, strict=True) for line in [head, *more]
    )


def _row(status: Status, named: Iterable[str], now: float) -> tuple[str, ...]:
    values = (number(status["metrics"].get(metric)) for metric in named)
    submitted = status["submitted"]
    old = "-" if submitted is None else age(max(now - submitted, 0.0))
    return (status["trial"], status["state"], old, progress(status), *values, commit(status))


def one(status: Status, width: int | None = None) -> str:
    """Return everything about one trial."""
    texts = [finding["text"] for finding in status["findings"]]
    lines = [f"{status['trial']}  {status['state']}  step {progress(status)}"]
    for head, text in zip(["  ", *["  also: "] * len(texts)], texts, strict=False):
        lines += hanging(head, plain(text), width)
    if shown := metrics(status["metrics"]):
        lines += hanging("  ", shown, width)
    lines += table([(f"  {name}", text) for name, text in _facts(status)])
    tasks = (task for group in status["groups"] for task in group["tasks"])
    lives = any(task["state"] in LIVES for task in tasks)
    shows_tasks = lives or status["state"] in LIVES or not status["incarnations"]
    for rows in (
        _tasks(status) if shows_tasks else [],
        _rollout_tasks(status),
        _incarnations(status),
    ):
        if rows[1:]:
            lines += ["", *table(rows, width)]
    if status["traceback"]:
        lines += ["", *_harmless(status["traceback"])]
    if status["state"] == "FAILED":
        lines += ["", *hanging("", _after_failure(status["trial"]), width)]
    return "\n".join(lines)


def _facts(status: Status) -> Iterator[tuple[str, str]]:
    if status["incarnations"]:
        yield "commit", commit(status)
    if links := _links(status):
        yield "job", links
    yield from _rollouts(status)
    useful = status["timing"]["effective_ratio"]
    if useful is not None:
        steps = sum(row["lost_steps"] for row in status["incarnations"])
        lost = f", {steps} lost {'step' if steps == 1 else 'steps'}" if steps else ""
        rest = f"; the rest: queue, start-up{lost}" if lost or useful <= 0.995 else ""
        yield "useful time", f"{useful:.0%}{rest}"
    yield "directory", status["run"]
    if status["export"]:
        yield "exported", status["export"]
    yield from _results(status)
    if status["report"]:
        yield "report", status["report"]


def rollouts(status: Status) -> str:
    """Return ``2 of 4 tasks, 1,234 tokens/s; the trainers wait for …``; "" without such tasks."""
    found = status["rollouts"]
    if found is None:
        return ""
    joined = [task for task in found["tasks"] if task["host"]]
    paces = [task["tokens_per_s"] for task in joined if task["tokens_per_s"] is not None]
    pace = f", {number(sum(paces))} tokens/s" if paces else ""
    waits = f"; the trainers wait {plain(found['waits_for'])}" if found["waits_for"] else ""
    return f"{len(joined)} of {found['wanted']} tasks{pace}{waits}"


def _rollouts(status: Status) -> Iterator[tuple[str, str]]:
    """Yield rows about rollout tasks: their state, groups by staleness, groups not trained on."""
    found = status["rollouts"]
    if found is None:
        return
    yield "rollouts", rollouts(status)
    stuck = [task for task in found["tasks"] if task["problem"]]
    if stuck:
        more = f" (and {len(stuck) - 1} more)" if stuck[1:] else ""
        where = f"{plain(stuck[0]['task'])} on {plain(stuck[0]['host'])}{more}"
        yield "no weights", f"{where}: {plain(stuck[0]['problem'])}"
    ages = [(name, _counted(found[name])) for name in ("trained", "finished")]
    if shown := "; ".join(f"{name} {counts}" for name, counts in ages if counts):
        yield "groups by age", shown
    queued = ("damaged", "aborted", "given_back", "lost")
    again = {name: found[name] for name in queued if found[name]}
    kinds = {"dropped": found["dropped"], "refused": found["refused"], "queued again": again}
    if shown := "; ".join(f"{name} {_counted(one)}" for name, one in kinds.items() if one):
        yield "not trained", shown


def _counted(counts: Mapping[str, int]) -> str:
    """Return counts as ``0: 80, 1: 16``."""
    return ", ".join(f"{plain(name).replace('_', ' ')}: {count}" for name, count in counts.items())


def _rollout_tasks(status: Status) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("ROLLOUTS", "ATTEMPT", "HOST", "STATE", "WEIGHTS", "PROMPTS", "TOKENS/S", "LAST WORD")
    ]
    tasks = status["rollouts"]["tasks"] if status["rollouts"] else []
    for task in tasks[:MOST_TASKS]:
        rows.append(
            (
                plain(task["task"]),
                str(task["attempt"]),
                plain(task["host"]) or "-",
                task["state"],
                task["version"] or "-",
                str(task["leased"]),
                number(task["tokens_per_s"]),
                f"{age(task['silent_s'])} ago",
            )
        )
    if more := tasks[MOST_TASKS:]:
        rows.append((f"and {len(more)} more", *[""] * 7))
    return rows


def _results(status: Status) -> Iterator[tuple[str, str]]:
    results = status["results"] or {}
    for name, path in (("results", results.get("file")), ("summary", results.get("summary"))):
        if path is not None:
            yield name, path


def _links(status: Status) -> str:
    """Return the current job, such as ``41_1, 20 min left, 6 more links``."""
    link, left = status["link"], status["links_left"]
    if status["state"] not in LIVES:
        return ""
    waiting = [task["job_id"] for group in status["groups"] for task in group["tasks"]]
    parts = [link["job_id"] if link else next(iter(waiting), None) or "unknown"]
    if link is not None and link["time_left_s"] is not None:
        parts.append(f"{age(link['time_left_s'])} left")
    following = f"{left or 'no'} more link{'s' if left != 1 else ''}"
    return ", ".join([*parts, following])


def _harmless(text: str) -> list[str]:
    """Return the lines of a traceback without control characters, with their indentation."""
    lines = (line.expandtabs() for line in text.rstrip().splitlines())
    return ["".join(one if one.isprintable() else " " for one in line) for line in lines]


def _after_failure(trial: str) -> str:
    return (
        f"Fix the cause, then: slurmrl resume {trial} (add --update-code if you changed code: a "
        "trial runs the code that it was submitted with)"
    )


def _incarnations(status: Status) -> list[tuple[str, ...]]:
    """Return a row for each of the newest incarnations, with the description of its end."""
    rows: list[tuple[str, ...]] = [
        ("#", "JOB", "HOSTS", "STEPS", "COMMIT", "LOST", "TOOK", "HOW IT ENDED")
    ]
    for row in status["incarnations"]:
        first, last = row["from_step"] + 1, row["to_step"]
        rows.append(
            (
                str(row["number"]),
                row["job_id"] or "-",
                brief(row["hosts"]),
                f"{first}-{last}" if first <= last else "-",
                "-" if row["commit"] is None else str(row["commit"]),
                str(row["lost_steps"] or "-"),
                age(row["seconds"]),
                plain(row["how"]),
            )
        )
    return rows


def brief(names: Sequence[str]) -> str:
    """Return the first names and the number of others, such as ``n0,n1,n2 +6``."""
    more = f" +{len(names) - SHOWN_HOSTS}" if len(names) > SHOWN_HOSTS else ""
    return f"{','.join(names[:SHOWN_HOSTS])}{more}" or "-"


def conclusion(status: Status, again: str) -> str:
    """Return lines about the end of a watched run; ``again`` ends each suggested command."""
    trial, state = status["trial"], status["state"]
    lines = [f"{trial} {state}: step {progress(status)}, last commit {commit(status)}"]
    if state == "COMPLETED":
        lines.append(f"  {metrics(status['metrics'])}")
        if status["export"]:
            lines.append(f"  exported model  {status['export']}")
        lines += [f"  {name:<14}  {path}" for name, path in _results(status)]
    elif state in LIVES:
        lines.append(f"  the run continues; to watch it: slurmrl status {trial}{again}")
        lines.append(f"  to end it with a commit: slurmrl stop {trial}{again}")
    else:
        if state == "FAILED":
            lines.append(f"  {first_line(status['reason'])}")
            lines += [f"  {line}" for line in _harmless(status["traceback"] or "")]
        lines.append(f"  what happened: slurmrl status {trial}{again}; slurmrl logs {trial}{again}")
        lines.append(f"  to continue:   slurmrl resume {trial}{again}")
        if state == "FAILED":
            lines[-1] += " (add --update-code if you changed code)"
    return "\n".join(lines)


def _tasks(status: Status) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("TASK", "JOB", "HOST", "STATE", "ATTEMPT", "HEARTBEAT", "")]
    for group in status["groups"]:
        many = len(group["tasks"]) > MOST_TASKS
        kinds = [_kind(index, task, many) for index, task in enumerate(group["tasks"])]
        numbered = zip(kinds, enumerate(group["tasks"]), strict=True)
        for _, alike in groupby(numbered, lambda item: item[0]):
            rows.append(_together(group["name"], [item for _, item in alike]))
    return rows


def _kind(index: int, task: Status, many: bool) -> tuple[Any, ...]:
    """Return a key; tasks with equal keys share a line.

    Equal tasks share a line if they have no host or belong to a large group.
    """
    apart = task["host"] is not None and not many
    states = (task["job_id"], task["state"], task["attempt"], task["reason"])
    return (*states, task["lease_age_s"] is None, index if apart else None)


def _together(group: str, alike: Sequence[tuple[int, Status]]) -> tuple[str, ...]:
    (first, task), (last, _) = alike[0], alike[-1]
    hosts = [one["host"] for _, one in alike if one["host"] is not None]
    ages = [one["lease_age_s"] for _, one in alike if one["lease_age_s"] is not None]
    return (
        f"{group}/{first}" if first == last else f"{group}/{first}-{last}",
        task["job_id"] or "-",
        brief(hosts),
        task["state"],
        "-" if task["attempt"] is None else str(task["attempt"]),
        f"{age(max(ages))} ago" if ages else "-",
        task["reason"] if task["state"] != "RUNNING" else "",
    )
