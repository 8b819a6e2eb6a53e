"""What an incarnation goes on from."""

from __future__ import annotations

from typing import Any

from slurmrl.checkpoint.manifest import read_state
from slurmrl.history.state import TrialState
from slurmrl.paths import RunPaths


def restore(paths: RunPaths, state: TrialState) -> dict[str, Any] | None:
    """The committed state to go on from, or None at the very start."""
    if state.last_commit is None:
        return None
    return read_state(paths.checkpoints / state.last_commit.directory)
