"""Going on with another layout: other numbers of ranks, other micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from slurmrl.config.schema import Config, Model
from slurmrl.recover.differences import FOLLOWERS, LAYOUT, changes

WHERE: Final = ("backend", "gpus", "model")
"""What of a role says on which ranks it lies."""


def follow_actor(config: Config, overrides: Sequence[str]) -> list[str]:
    """The overrides with those added that move the critic and the reference along with the actor:
    roles that lie where the actor did and of whose own place nothing is said."""
    if not _moves("actor", overrides):
        return list(overrides)
    added = []
    for role in FOLLOWERS:
        model: Model | None = getattr(config, role)
        if model is None or _moves(role, overrides):
            continue
        if all(getattr(model, name) == getattr(config.actor, name) for name in WHERE):
            added += [f'{role}.backend=""', f'{role}.gpus=""', f"{role}.model=null"]
    return [*added, *overrides]


def _moves(role: str, overrides: Sequence[str]) -> bool:
    keys = [text.partition("=")[0].strip() for text in overrides]
    return any(
        key == f"{role}.{name}" or key.startswith(f"{role}.{name}.")
        for key in keys
        for name in WHERE
    )


def consequences(old: Config, new: Config) -> list[str]:
    """What a changed layout keeps and what not, as lines for the user; empty if it is the same."""
    changed = changes(old, new, LAYOUT)
    if not changed:
        return []
    moved = any(line.partition(":")[0].endswith(WHERE) for line in changed)
    lost = ["sums are added in another order"]
    if moved:
        lost.append("each rank's random state is drawn anew from the step and the rank")
    return [
        "another layout: " + "; ".join(changed),
        "kept exactly: weights, optimizer state, the order of the data and what was consumed",
        f"not bit for bit as before: {'; '.join(lost)}",
    ]
