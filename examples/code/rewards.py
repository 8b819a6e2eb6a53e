"""A reward for the form of an answer, to be added to a reward for its content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def short(
    prompts: Sequence[str],
    completions: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    *,
    lines: int,
) -> list[float]:
    """Return 1 for a completion of at most ``lines`` lines, else 0."""
    return [float(completion.count("\n") < lines) for completion in completions]
