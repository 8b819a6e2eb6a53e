"""Changes of the configuration with which a trial may be resumed, and their consequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

from slurmrl.config.allocation import parse
from slurmrl.config.schema import Config, role_key
from slurmrl.config.schema.config import FOLLOWERS, ROLES
from slurmrl.config.source import Source, dotted

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
"""Dotted keys (`*` is any string) that change how a run is executed, monitored or ended, but not
its results. All keys below a listed key are included."""


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
"""Dotted keys that change the number of ranks or the micro-batches, but not the mathematical
result. A resumed trial may change these keys; `consequences` reports the resulting differences."""


SCHEDULES = frozenset(f"{role}.optimizer.schedule_steps" for role in SECTIONS)
"""Dotted keys that, like ``total_steps``, may change the end of a learning-rate schedule;
`moved_schedules` reports the effect."""


class Difference(NamedTuple):
    """A setting that differs between two configurations."""

    key: str
    """Dotted key of the setting."""
    before: str
    now: str


def differences(old: Config, new: Config) -> list[str]:
    """Return the settings that prevent a trial of ``old`` from continuing with ``new``.

    A setting has a line such as ``actor.optimizer.lr: 1e-05 in the trial, 3e-05 now``.
    """
    differing = _differing(old.model_dump(mode="json"), new.model_dump(mode="json"), "")
    return [
        f"{key}: {before} in the trial, {now} now"
        for key, before, now in differing
        if not _is_at_or_below(key, MAY_CHANGE | LAYOUT | SCHEDULES)
    ]


def changes(old: Config, new: Config, keys: frozenset[str]) -> list[Difference]:
    """Return the differing settings with a key in ``keys`` or in a section that ``keys`` names."""
    differing = _differing(old.model_dump(mode="json"), new.model_dump(mode="json"), "")
    return [difference for difference in differing if _is_at_or_below(difference.key, keys)]


def may_change() -> str:
    """Return a message part that lists the settings a resumed trial may change.

    A setting that every model has appears once. A trial cannot move to another root.
    """
    keys = MAY_CHANGE | LAYOUT | SCHEDULES
    of_models = {key.removeprefix("actor.") for key in keys if key.startswith("actor.")}
    others = keys - {f"{role}.{name}" for role in SECTIONS for name in of_models} - {"root"}
    return f"{', '.join(sorted(others))}; of each model: {', '.join(sorted(of_models))}"


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
    """Return whether ``keys`` contains the dotted key or one of its enclosing sections."""
    parts = key.split(".")
    above = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(fnmatchcase(name, pattern) for name in above for pattern in keys)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    return "a section" if isinstance(value, dict) else repr(value)


WHERE: Final = ("backend", "gpus", "model")
"""Settings of a role that determine its layout."""


def follow_actor(config: Config, overrides: Sequence[str]) -> list[str]:
    """Return the overrides, plus overrides that give other roles the actor's new layout.

    A role gets this layout if it had the actor's layout and the overrides set no layout for it.
    Also add the layout that a new number of rollout tasks needs.
    """
    added = _for_other_tasks(config, overrides)
    if not _moves("actor", overrides):
        return [*added, *overrides]
    for role in (*FOLLOWERS, *config.models):
        model = config.find_model(role)
        if model is None or _moves(role, overrides):
            continue
        if all(getattr(model, name) == getattr(config.actor, name) for name in WHERE):
            key = dotted(role_key(role))
            added += [f'{key}.backend=""', f'{key}.gpus=""', f"{key}.model=null"]
    return [*added, *overrides]


def _for_other_tasks(config: Config, overrides: Sequence[str]) -> list[str]:
    """Return the layout of a single task; `rollout.tasks.max` sets the number of tasks."""
    keys = {text.partition("=")[0].strip() for text in overrides}
    if "rollout.tasks.max" not in keys or "rollout.backend" in keys or config.rollout.tasks is None:
        return []
    layout = parse(config.rollout.backend)
    return [f"rollout.backend={replace(layout, sizes={**layout.sizes, 'dp': 1})}"]


def keep_precision(old: Config, new: Config, source: Source) -> list[str]:
    """Return overrides that keep the data types with which a trial of ``old`` began.

    Only data types that the configuration does not set need overrides: their defaults depend on the
    hosts and on slurmrl's version.
    """
    overrides = []
    for role in old.roles:
        before, now = old.find_model(role), new.find_model(role)
        written = source.writes(*role_key(role), "dtype")
        if before is not None and now is not None and before.dtype != now.dtype and not written:
            overrides.append(f"{dotted(role_key(role))}.dtype={before.dtype}")
    return overrides


def _moves(role: str, overrides: Sequence[str]) -> bool:
    section = dotted(role_key(role))
    keys = [text.partition("=")[0].strip() for text in overrides]
    return any(
        key == f"{section}.{name}" or key.startswith(f"{section}.{name}.")
        for key in keys
        for name in WHERE
    )


def consequences(old: Config, new: Config) -> list[str]:
    """Return lines for the user about properties that a changed layout preserves or loses.

    Return no lines if the layout is the same.
    """
    changed = changes(old, new, LAYOUT)
    if new.rollout.tasks is not None:  # The trainers' layout excludes rollout tasks.
        changed = [change for change in changed if not change.key.startswith("rollout.")]
    if not changed:
        return []
    shown = [f"{change.key}: {change.before} -> {change.now}" for change in changed]
    lost = ["sums are computed in another order"]
    if _ranks(old) != _ranks(new):
        lost.append("each rank's random state is reseeded from the step and the rank")
    return [
        "changed layout: " + "; ".join(shown),
        "preserved exactly: weights, optimizer state, order of the data and position in it",
        f"results are not bit-identical: {'; '.join(lost)}",
    ]


def _ranks(config: Config) -> dict[str, int]:
    """Return the number of ranks of each role that is in a checkpoint."""
    models = {role: config.find_model(role) for role in config.roles}
    return {
        role: parse(model.backend).world_size
        for role, model in models.items()
        if model is not None and (role != "ref" or model.ema is not None)
    }


def moved_schedules(
    old: Config, new: Config, *, trained: Mapping[str, int], step: int, optimizer_steps: int
) -> list[str]:
    """Return lines for the user about learning rates that change if the trial resumes at ``step``.

    ``trained`` maps each trained role to the number of first steps that do not train it. Each later
    step has ``optimizer_steps`` optimizer steps.
    """
    lines = []
    old_steps, new_steps = old.total_steps or 0, new.total_steps or 0
    for role, untrained_steps in trained.items():
        before, now = old.model(role).optimizer, new.model(role).optimizer
        ends = before.last_step((old_steps - untrained_steps) * optimizer_steps) + 1
        moved = now.last_step((new_steps - untrained_steps) * optimizer_steps) + 1
        if now.schedule == "constant" or moved == ends:
            continue
        made = max(step - untrained_steps, 0) * optimizer_steps
        rates = before.learning_rate(made, ends), now.learning_rate(made, moved)
        lines.append(
            f"{role}: the {now.schedule} schedule of its learning rate ends after {moved} "
            f"optimizer steps, not {ends}: after step {step} the rate continues from "
            f"{rates[1]:.3g}, not {rates[0]:.3g}; "
            f"to keep {ends}, set {dotted(role_key(role))}.optimizer.schedule_steps={ends}"
        )
    return lines
