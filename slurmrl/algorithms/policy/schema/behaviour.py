"""The policy that drew the tokens of a batch, and how the objective accounts for it.

Without staleness and in the precision of training it is the policy before the updates. Elsewhere it
is another one, and a loss is right in two ways: its ratios compare with the log-probabilities of
generation, or the old ones are recomputed and importance weights correct for the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slurmrl.algorithms.policy.schema.objective import Correction
from slurmrl.config.schema import Config
from slurmrl.plan.precision import unlike_training


def settled(settings: Correction, config: Config) -> dict[str, Any]:
    """Return the values of `recompute_logprobs` and `correction`, with those that follow from the
    rest of the configuration where they are not set."""
    stale, unlike = bool(_staleness(config)), bool(unlike_training(config))
    recomputes, correction = settings.recompute_logprobs, settings.correction
    if recomputes is None:
        if settings.compares:
            recomputes = True
        elif stale or (unlike and correction == "none"):
            recomputes = False
        else:
            recomputes = unlike or config.actor.dtype == "bfloat16"
    if correction is None:
        correction = "truncate" if recomputes and (stale or unlike) else "none"
    return {"recompute_logprobs": recomputes, "correction": correction}


def notes(settings: Correction, config: Config) -> Iterator[str]:
    """Yield which settings account for completions of another policy, and why. ``settings`` are
    settled."""
    reasons = [reason for reason in (_staleness(config), unlike_training(config)) if reason]
    if not reasons:
        return
    because = " and ".join(reasons)
    if settings.corrects:
        yield (
            f"algorithm.correction {settings.correction}: importance weights correct for the "
            f"policy that drew the tokens, because {because}"
        )
    elif not settings.recompute_logprobs:
        yield (
            "algorithm.recompute_logprobs false: ratios compare with the policy that drew the "
            f"tokens, because {because}"
        )
    else:
        yield (
            "wrong gradients: algorithm.recompute_logprobs true with correction none trains "
            f"completions as if the present policy had drawn them, but {because}; set "
            "algorithm.correction, or recompute_logprobs to false"
        )


def _staleness(config: Config) -> str:
    """How old completions may be; empty if the weights that they change have drawn them."""
    tasks = config.rollout.tasks
    if tasks is None or not tasks.max_staleness:
        return ""
    steps = "1 step" if tasks.max_staleness == 1 else f"{tasks.max_staleness} steps"
    return f"completions may be {steps} old (rollout.tasks.max_staleness)"
