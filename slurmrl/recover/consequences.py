"""Consequences of a changed layout or learning-rate schedule for a resumed trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from slurmrl.allocation import parse
from slurmrl.config.schema import Config, Optimizer, role_key
from slurmrl.config.schema.config import FOLLOWERS
from slurmrl.config.source import Source, dotted
from slurmrl.recover.differences import LAYOUT, changes

WHERE: Final = ("backend", "gpus", "model")
"""Settings of a role that decide its layout."""


def follow_actor(config: Config, overrides: Sequence[str]) -> list[str]:
    """Add overrides that move the critic and the reference along with the actor, if they had the
    actor's layout and the overrides set none for them; and a layout for another number of rollout
    tasks."""
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
    """The layout of a single task, which `rollout.tasks.max` multiplies."""
    keys = {text.partition("=")[0].strip() for text in overrides}
    if "rollout.tasks.max" not in keys or "rollout.backend" in keys or config.rollout.tasks is None:
        return []
    layout = parse(config.rollout.backend)
    return [f"rollout.backend={replace(layout, sizes={**layout.sizes, 'dp': 1})}"]


def keep_precision(old: Config, new: Config, source: Source) -> list[str]:
    """Return overrides that keep the data types of a trial that began with ``old`` where the
    configuration sets none: the default depends on the hosts and on slurmrl's version."""
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
    """Describe what a changed layout preserves and what it does not, as lines for the user; empty
    if the layout is the same."""
    changed = changes(old, new, LAYOUT)
    if new.rollout.tasks is not None:  # their number is no matter of the trainers' layout
        changed = [change for change in changed if not change.key.startswith("rollout.")]
    if not changed:
        return []
    shown = [f"{change.key}: {change.before} -> {change.now}" for change in changed]
    lost = ["sums have another order"]
    if _ranks(old) != _ranks(new):
        lost.append("each rank's random state is reseeded from the step and the rank")
    return [
        "changed layout: " + "; ".join(shown),
        "preserved exactly: weights, optimizer state, order of the data and position in it",
        f"results are not bit-identical: {'; '.join(lost)}",
    ]


def _ranks(config: Config) -> dict[str, int]:
    """The ranks of each role in a checkpoint, which holds a random state of each rank."""
    models = {role: config.find_model(role) for role in config.roles}
    return {
        role: parse(model.backend).world_size
        for role, model in models.items()
        if model is not None and (role != "ref" or model.ema is not None)
    }


def moved_schedules(
    old: Config, new: Config, *, trained: Mapping[str, int], step: int, optimizer_steps: int
) -> list[str]:
    """Describe how the learning rates of the ``trained`` roles change when the trial resumes after
    ``step``, as lines for the user; empty if they do not change. The numbers of ``trained`` are
    steps at the start of the run in which a role is not trained yet; each further step has
    ``optimizer_steps`` optimizer steps."""
    lines = []
    old_steps, new_steps = old.total_steps or 0, new.total_steps or 0
    for role, untrained_steps in trained.items():
        before, now = _optimizer(old, role), _optimizer(new, role)
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
            f"set {dotted(role_key(role))}.optimizer.schedule_steps={ends} to keep it"
        )
    return lines


def _optimizer(config: Config, role: str) -> Optimizer:
    return config.model(role).optimizer
