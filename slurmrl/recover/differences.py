"""Which settings of a trial stand for its whole life, and which may change when it is resumed."""

from __future__ import annotations

from typing import Any

from slurmrl.config.schema import Config

MAY_CHANGE = frozenset(
    {
        "root",
        "total_steps",
        "stop_when",
        "max_restarts_without_commit",
        "step_timeout_s",
        "cluster",
        "logging",
        "checkpoint",
        "evaluation.every_steps",
        "evaluation.every_seconds",
        "evaluation.every_epochs",
        "evaluation.at_start",
        "evaluation.at_end",
    }
)
"""Dotted keys, with all below them, that change how a run is executed, watched or ended, but not
what it computes."""


def differences(old: Config, new: Config) -> list[str]:
    """What keeps a trial that began with ``old`` from going on with ``new``: one line a setting,
    ``actor.optimizer.lr: 1e-05 in the trial, 3e-05 now``; empty if they agree."""
    return _compare(old.model_dump(mode="json"), new.model_dump(mode="json"), "")


def _compare(old: Any, new: Any, key: str) -> list[str]:
    if key in MAY_CHANGE:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for name in dict.fromkeys([*old, *new])
            for line in _compare(old.get(name), new.get(name), f"{key}.{name}" if key else name)
        ]
    return [] if old == new else [f"{key}: {_shown(old)} in the trial, {_shown(new)} now"]


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    return "a section" if isinstance(value, dict) else repr(value)
