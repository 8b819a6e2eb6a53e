"""What a report shows of a trial. Everything is JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric. A missing value is None."""

    x: Sequence[int]
    """Steps."""
    y: Sequence[float | None]


@dataclass(frozen=True, kw_only=True)
class CallTime:
    """How long a call of a step takes."""

    name: str
    ranks: Sequence[int]
    """That run it; empty if the plan does not say."""
    seconds: float
    """Mean of the newest steps."""
    planned_s: float | None = None
    """The plan's estimate; None for an unknown GPU."""
    flops: float | None = None
    """Floating-point operations of all ranks: the plan's, scaled to the tokens of the steps."""


@dataclass(frozen=True, kw_only=True)
class TaskSpan:
    """The working time of one attempt of a rollout task.

    Times are seconds since the epoch, by the master's clock.
    """

    task: str
    attempt: int
    host: str
    began: float
    ended: float | None
    """None: there is no word of its end."""
    how: str
    """How it ended."""


@dataclass(frozen=True, kw_only=True)
class CommitRow:
    step: int
    directory: str
    incarnation: int
    time: float
    """Seconds since the epoch."""
    bytes: int | None
    """None: its manifest cannot be read, or the commit was deleted."""
    seconds: float | None
    """How long it took to write."""
    stall_s: float | None
    """How long training waited for it."""
    deleted: bool
    exported: bool


@dataclass(frozen=True, kw_only=True)
class Samples:
    rows: Sequence[Mapping[str, Any]]
    """Lines of ``samples/`` by step; then those of evaluations, with ``evaluation: true``."""
    steps: int
    """Steps and evaluations with kept samples."""
    shown: int
    """Those of them that ``rows`` covers."""


@dataclass(frozen=True, kw_only=True)
class TrialReport:
    name: str
    status: Mapping[str, Any]
    """The object of ``slurmrl status --json`` (`watch.status`)."""
    lines: int
    """Of metrics."""
    curves: Mapping[str, Curve]
    calls: Sequence[CallTime]
    step_s: float | None
    """Mean time of these steps."""
    tokens_per_s: float | None
    timeline: Sequence[Mapping[str, Any]]
    """The newest steps: ``step`` and ``calls``, each with its ``name`` and ``ranks``, which are
    (rank, begin in seconds since the epoch, seconds)."""
    peaks: Sequence[Sequence[int]]
    """(rank, most bytes that it has had)"""
    planned: Mapping[str, Any]
    """The plan's figures (`plan.plan_values.figures`); empty if there are none."""
    tasks: Sequence[TaskSpan]
    rollouts: Mapping[str, Any] | None
    """What the newest master said last about rollout tasks (`run.reports`)."""
    commits: Sequence[CommitRow]
    samples: Samples
    config: str
    """The resolved configuration as YAML."""
    settings: Mapping[str, Any]
    """The same by dotted key."""
    environment: Mapping[str, Any]
    """The record of the newest code snapshot: versions, packages, git."""
    diffs: Mapping[str, str]
    """What git had not committed, by repository."""
