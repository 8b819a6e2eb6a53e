"""Going on with another end of the run, or of a learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterable

from slurmrl.config.schema import Config, Model, Optimizer


def moved_schedules(
    old: Config, new: Config, *, trained: Iterable[str], step: int, optimizer_steps: int
) -> list[str]:
    """What happens to the learning rates of the ``trained`` roles when the trial goes on behind
    ``step``, as lines for the user; empty where they stay as they were. A step of the run makes
    ``optimizer_steps`` of each."""
    found = []
    for role in trained:
        before, now = _optimizer(old, role), _optimizer(new, role)
        ends = before.last_step(old.total_steps * optimizer_steps) + 1
        moved = now.last_step(new.total_steps * optimizer_steps) + 1
        if now.schedule == "constant" or moved == ends:
            continue
        made = step * optimizer_steps
        rates = before.learning_rate(made, ends), now.learning_rate(made, moved)
        found.append(
            f"{role}: the {now.schedule} schedule of its learning rate ends after {moved} "
            f"optimizer steps, not {ends}: behind step {step} the rate goes on from "
            f"{rates[1]:.3g}, not {rates[0]:.3g}; {role}.optimizer.schedule_steps={ends} keeps it"
        )
    return found


def _optimizer(config: Config, role: str) -> Optimizer:
    model: Model = getattr(config, role)
    return model.optimizer
