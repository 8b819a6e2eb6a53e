"""Your own reward, which gets the tokens, the group and the step of each completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def novelty(
    prompts: Sequence[str],
    completions: Sequence[str],
    rows: Sequence[dict[str, Any]],
    *,
    token_ids: Sequence[Sequence[int]],
    indices: Sequence[int],
    siblings: Sequence[Sequence[str]],
    step: int,
    steps: int = 30,
    most_tokens: int = 5,
) -> list[float]:
    """Return 1 for a completion that differs from all earlier ones of its prompt, else 0.

    A completion of more than ``most_tokens`` tokens also gets 0. The reward declines to zero over
    the first ``steps`` steps of the run.
    """
    left = max(0.0, 1.0 - step / steps)
    return [
        left * (len(tokens) <= most_tokens and completion not in group[:index])
        for completion, tokens, index, group in zip(
            completions, token_ids, indices, siblings, strict=True
        )
    ]
