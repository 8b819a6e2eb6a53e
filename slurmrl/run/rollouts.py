"""What the master tells about rollout tasks, for the status of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from slurmrl.fsio.shapes import COUNT, NUMBER, SECONDS, SIZE


@dataclass(frozen=True, kw_only=True)
class RolloutTaskView:
    """An attempt of a task that lives, as far as the master knows."""

    task: str
    """``rollout/3``"""
    attempt: Annotated[int, COUNT]
    host: str = ""
    """Empty until the task has joined."""
    version: str = ""
    """The weights that it holds; empty if it has none yet."""
    leased: Annotated[int, SIZE] = 0
    """Items that it works on."""
    silent_s: Annotated[float, SECONDS] = 0.0
    """Since its last message."""
    counts: Mapping[str, Annotated[float, NUMBER]] = field(default_factory=dict)
    """Sums since the attempt began."""
    leaving: bool = False

    @property
    def state(self) -> str:
        if not self.host:
            return "starting"
        if self.leaving:
            return "leaving"
        if not self.version:
            return "no weights"
        return "works" if self.leased else "idle"


@dataclass(frozen=True, kw_only=True)
class RolloutsView:
    """The rollout tasks of a run. Sums are since the incarnation began."""

    wanted: Annotated[int, SIZE] = 0
    """Tasks that may run at a time."""
    waits_for: str = ""
    """What the trainers wait for; empty if there is a batch for the next step, or one in work."""
    finished: Mapping[str, Annotated[int, SIZE]] = field(default_factory=dict)
    """Groups that wait for a step, by their staleness in steps: age of the oldest weights."""
    trained: Mapping[str, Annotated[int, SIZE]] = field(default_factory=dict)
    """Groups that steps have taken, by their staleness then."""
    dropped: Mapping[str, Annotated[int, SIZE]] = field(default_factory=dict)
    """Groups that are never trained, by reason, since the trial began."""
    refused: Mapping[str, Annotated[int, SIZE]] = field(default_factory=dict)
    """Results that did not count, by reason."""
    damaged: Annotated[int, SIZE] = 0
    """Groups whose samples could not be read; they are made again."""
    aborted: Annotated[int, SIZE] = 0
    """Items that were taken back, because their samples would have been too stale."""
    given_back: Annotated[int, SIZE] = 0
    """Items that tasks gave back."""
    lost: Annotated[int, SIZE] = 0
    """Items of tasks that were lost or left."""
    tasks: tuple[RolloutTaskView, ...] = ()
