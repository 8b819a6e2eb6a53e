"""Learning rates as a pure function of the step. Torch-free."""

from __future__ import annotations

from math import cos, pi

from slurmrl.config.schema.optimizer import Optimizer


def learning_rate(options: Optimizer, step: int, total_steps: int) -> float:
    """Rate of optimizer step ``step`` (from 0) out of ``total_steps``.

    Warm-up rises linearly and ends at ``lr``; then constant, linear or half a cosine down to
    ``lr * min_lr_ratio`` at the last step, where it stays.
    """
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    if options.schedule == "constant":
        return options.lr
    falling_steps = max(1, total_steps - 1 - options.warmup_steps)
    progress = min(1.0, (step - options.warmup_steps) / falling_steps)
    left = 1.0 - progress if options.schedule == "linear" else 0.5 * (1.0 + cos(pi * progress))
    return options.lr * (options.min_lr_ratio + (1.0 - options.min_lr_ratio) * left)
