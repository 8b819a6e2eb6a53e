"""When rollout tasks worked and what a step's time goes to, from events, metrics and the plan.

Pure functions.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurmrl.desk.report.contents import CallTime, TaskSpan
from slurmrl.run.events import Event

RECENT = 50
"""Newest steps whose times are averaged."""
PREFIX = "time/"
TOKENS = "tokens"
"""The metric of a step's tokens, those of prompts and completions."""


def call_times(
    lines: Sequence[Mapping[str, Any]],
    calls: Iterable[Mapping[str, Any]],
    planned: Mapping[str, Any],
) -> list[CallTime]:
    """Return the mean time and operations of each call, in the plan's order.

    ``planned`` has the estimates of the calls by name, and the tokens of a step that they assume.
    The operations of a step are nearly proportional to its tokens, so they are scaled to those of
    the steps.
    """
    newest = lines[-RECENT:]
    tokens, assumed = mean(newest, TOKENS), planned.get("tokens")
    scale = tokens / assumed if tokens is not None and assumed else None
    estimates = planned.get("calls", {})
    found = []
    for call in calls:
        seconds = mean(newest, f"{PREFIX}{call['name']}")
        if seconds is None:
            continue
        estimate = estimates.get(call["name"], {})
        flops = estimate.get("flops")
        found.append(
            CallTime(
                name=call["name"],
                ranks=call.get("ranks") or (),
                seconds=seconds,
                planned_s=estimate.get("seconds"),
                flops=None if flops is None or scale is None else flops * scale,
            )
        )
    return found


def mean(lines: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """Return the mean of a metric; None if no line has it."""
    values = [value for line in lines if isinstance(value := line.get(name), int | float)]
    return statistics.fmean(values) if values else None


def task_spans(events: Iterable[Event]) -> list[TaskSpan]:
    """Return the attempts of rollout tasks that have joined, by the time when they did."""
    began: dict[tuple[str, int], Event] = {}
    ended: dict[tuple[str, int], Event] = {}
    for event in events:
        key = str(event.get("task", "")), event.get("attempt", 0)
        if event["kind"] == "rollout_task" and event.get("state") == "joined":
            began.setdefault(key, event)
        elif event["kind"] == "rollout_task":
            ended[key] = event
    return [_span(*key, event, ended.get(key)) for key, event in began.items()]


def _span(task: str, attempt: int, joined: Event, end: Event | None) -> TaskSpan:
    said = [] if end is None else [end.get("state"), end.get("reason")]
    return TaskSpan(
        task=task,
        attempt=attempt,
        host=str(joined.get("host", "")),
        began=float(joined["time"]),
        ended=None if end is None else float(end["time"]),
        how=": ".join(str(word) for word in said if word),
    )
