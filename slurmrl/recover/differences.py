"""Settings that are fixed for a trial, and those that may change when it is resumed."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

from slurmrl.config.schema import Config
from slurmrl.config.schema.config import ROLES

SECTIONS: Final = (*ROLES, "models.*")
"""Dotted keys of the roles' sections."""

MAY_CHANGE = frozenset(
    {
        "root",
        "code",
        "total_steps",
        "stop_when",
        "max_restarts_without_commit",
        "step_timeout_s",
        "cluster",
        "transfer",
        "rollout.offload",
        "rollout.python",
        "rollout.servers",
        "rollout.server_weights",
        "rollout.server_keys",
        "rollout.server_args",
        "rollout.server_start_s",
        "rollout.server_silence_s",
        "rollout.publish",
        "rollout.slurm",
        "rollout.tasks.max",
        "rollout.tasks.max_in_flight",
        "rollout.tasks.min",
        "rollout.tasks.orphan_s",
        *(f"{role}.offload" for role in SECTIONS),
        "logging",
        "notify",
        "checkpoint",
        "reward.pool",
        "reward.parts.*.pool",
        "evaluation.every_steps",
        "evaluation.every_seconds",
        "evaluation.every_epochs",
        "evaluation.at_start",
        "evaluation.at_end",
        "evaluation.keep_last",
        "evaluation.tasks",
        "evaluation.pass_score",
        "evaluation.vote_pattern",
        "evaluation.suites.*.pass_score",
        "evaluation.suites.*.vote_pattern",
        "evaluation.suites.*.reward.pool",
        "evaluation.suites.*.reward.parts.*.pool",
    }
)
"""Dotted keys, including all keys below them (`*` is any text), that change how a run is executed,
monitored or ended, but not what it computes."""


LAYOUT = frozenset(
    {
        f"{role}.{name}"
        for role in SECTIONS
        for name in (
            "backend",
            "gpus",
            "model",
            "max_tokens_per_microbatch",
            "gradient_checkpointing",
            "cpu_offload",
            "transformer_engine",
        )
    }
    | {
        f"rollout.{name}"
        for name in ("backend", "gpus", "tensor_parallel_size", "pipeline_parallel_size")
    }
)
"""Dotted keys that change the number of ranks and the micro-batches of the same computation. They
may change too; `consequences.consequences` reports what is not preserved."""


SCHEDULES = frozenset(f"{role}.optimizer.schedule_steps" for role in SECTIONS)
"""Dotted keys that, like ``total_steps``, may change the end of a learning-rate schedule;
`consequences.moved_schedules` reports the effect."""


class Difference(NamedTuple):
    """A setting that differs between two configurations."""

    key: str
    """Dotted."""
    before: str
    now: str


def differences(old: Config, new: Config) -> list[str]:
    """Settings that keep a trial that began with ``old`` from continuing with ``new``. One line for
    each, ``actor.optimizer.lr: 1e-05 in the trial, 3e-05 now``; empty if they agree."""
    differing = _differing(old.model_dump(mode="json"), new.model_dump(mode="json"), "")
    return [
        f"{key}: {before} in the trial, {now} now"
        for key, before, now in differing
        if not _is_at_or_below(key, MAY_CHANGE | LAYOUT | SCHEDULES)
    ]


def changes(old: Config, new: Config, keys: frozenset[str]) -> list[Difference]:
    """Settings at or below ``keys`` that differ."""
    differing = _differing(old.model_dump(mode="json"), new.model_dump(mode="json"), "")
    return [difference for difference in differing if _is_at_or_below(difference.key, keys)]


def may_change() -> str:
    """List the settings that may change, for a message; those of models once for all of them."""
    keys = MAY_CHANGE | LAYOUT | SCHEDULES
    of_models = {key.removeprefix("actor.") for key in keys if key.startswith("actor.")}
    others = keys - {f"{role}.{name}" for role in SECTIONS for name in of_models}
    return f"{', '.join(sorted(others))}; of each model {', '.join(sorted(of_models))}"


def _differing(old: Any, new: Any, key: str) -> list[Difference]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            difference
            for name in dict.fromkeys([*old, *new])
            for difference in _differing(
                old.get(name), new.get(name), f"{key}.{name}" if key else name
            )
        ]
    return [] if old == new else [Difference(key, _shown(old), _shown(new))]


def _is_at_or_below(key: str, keys: frozenset[str]) -> bool:
    """Whether a dotted key, or a section that it lies in, is one of ``keys``."""
    parts = key.split(".")
    above = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(fnmatchcase(name, pattern) for name in above for pattern in keys)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    return "a section" if isinstance(value, dict) else repr(value)
