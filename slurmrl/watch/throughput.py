"""Training speed of a trial, from its metrics and events. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurmrl.run.events import Event

RECENT = 20
"""Newest steps that the pace is averaged over."""
RECENT_COMMITS = 5
STEP_S = "time/total"
"""The metric of a step's time, including its evaluation."""


def step_s(lines: Sequence[Mapping[str, Any]], events: Iterable[Event]) -> float | None:
    """Return the mean time of the newest steps, including evaluations. The first step of an
    incarnation is warm-up and left out, unless there are no others."""
    firsts = {event.get("step", -1) + 1 for event in events if event["kind"] == "ready"}
    timed = [line for line in lines if _number(line.get(STEP_S)) is not None]
    warm = [line for line in timed if line["step"] not in firsts]
    recent = (warm or timed)[-RECENT:]
    return sum(line[STEP_S] for line in recent) / len(recent) if recent else None


def left_s(pace_s: float | None, step: int, total: int | None) -> float | None:
    """Return the time to the last step at this pace."""
    if pace_s is None or total is None:
        return None
    return max(total - step, 0) * pace_s


def commits(events: Iterable[Event]) -> tuple[float | None, float | None]:
    """Return how long the slowest of the newest commits took, and how long training waited for
    one at most."""
    newest = [event for event in events if event["kind"] == "commit"][-RECENT_COMMITS:]
    taken = [s for event in newest if (s := _number(event.get("seconds"))) is not None]
    stalls = [s for event in newest if (s := _number(event.get("stall_s"))) is not None]
    return max(taken, default=None), max(stalls, default=None)


def start_s(begun: float, events: Iterable[Event]) -> float | None:
    """Return the time from an incarnation's begin until its ranks were ready to train."""
    ready = next((event for event in events if event["kind"] == "ready"), None)
    if ready is None:
        return None
    said = _number(ready.get("seconds"))
    return said if said is not None else max(float(ready["time"]) - begun, 0.0)


def kept_s(trained_s: float | None, lines: Sequence[Mapping[str, Any]], step: int) -> float | None:
    """Return the total time of the steps up to ``step``, where the trial stands: those after it
    are lost, and their lines stay until the next incarnation begins."""
    if trained_s is None:
        return None
    lost = (_number(line.get(STEP_S)) or 0.0 for line in lines if line["step"] > step)
    return trained_s - sum(lost)


def effective_ratio(
    trained_s: float | None, first_step_at: float | None, until: float | None
) -> float | None:
    """Return the time of the steps that count / the time since the first of them could begin.
    Repeated steps count once; time in the queue counts as lost."""
    if trained_s is None or first_step_at is None or until is None or until <= first_step_at:
        return None
    return min(trained_s / (until - first_step_at), 1.0)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
