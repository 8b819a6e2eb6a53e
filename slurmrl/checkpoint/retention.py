"""Retention of commits."""

from __future__ import annotations

from collections.abc import Sequence

from slurmrl.history.state import Commit


def kept_by(
    commits: Sequence[Commit], keep_last: int, keep_every_steps: int | None
) -> dict[str, list[str]]:
    """Why each directory stays: ``last`` (one of the newest), ``every`` (its step is a multiple);
    nothing for one that may go. ``commits`` are in the order of their steps."""
    newest = {commit.directory for commit in commits[-keep_last:]}
    reasons: dict[str, list[str]] = {}
    for commit in commits:
        every = keep_every_steps is not None and commit.step % keep_every_steps == 0
        last = ["last"] if commit.directory in newest else []
        reasons[commit.directory] = last + (["every"] if every else [])
    return reasons
