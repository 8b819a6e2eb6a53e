"""The base of an incarnation: the newest undamaged commit, from which it resumes.

BEGIN names the base, so that all agents load the same. Newer, damaged commits are deleted from the
history right after BEGIN, with the reason, and their files are set aside.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slurmrl import log
from slurmrl.backoff import retry
from slurmrl.checkpoint.manifest import until_certain, verify
from slurmrl.errors import DamagedCheckpointError
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.history.log import History
from slurmrl.history.record import Kind, Record
from slurmrl.history.state import Commit, TrialState
from slurmrl.history.writer import IncarnationWriter, begin
from slurmrl.monitor import published
from slurmrl.monitor.events import EventWriter
from slurmrl.name_resolve.base import NameStore
from slurmrl.paths import RunPaths

logger = log.get(__name__)

LOOK_TIMEOUT_S = 300.0
"""Timeout for checking the checkpoints while the directory does not answer."""
LOOK_BACK = 3
"""Number of recent incarnations whose failures are searched for damaged checkpoints."""


@dataclass(frozen=True)
class Damage:
    commit: Commit
    reason: str


def begin_on_base(
    paths: RunPaths,
    names: NameStore,
    history: History,
    data: dict[str, Any],
    judge: Callable[[list[Record]], dict[str, Any] | None],
) -> tuple[IncarnationWriter, list[Damage]]:
    """Begin an incarnation on the newest usable commit; also return the newer, damaged ones.
    Raises as `begin`, and EnvironmentFailure."""
    damages: list[Damage] = []

    def describe(state: TrialState) -> dict[str, Any]:
        base, damages[:] = retry(
            "check the checkpoints",
            lambda: choose(paths, names, state),
            timeout_s=LOOK_TIMEOUT_S,
        )
        return {**data, "base": base}

    return begin(history, describe, judge), damages


def choose(
    paths: RunPaths,
    names: NameStore,
    state: TrialState,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[str | None, list[Damage]]:
    """Return the directory of the newest usable commit (None if there is none) and the damages of
    newer ones. This checks file sizes; ranks have checked and reported wrong checksums."""
    damages: list[Damage] = []
    reported = _reported_damage(names, state)
    for commit in reversed(state.commits):
        directory = paths.checkpoints / commit.directory
        reason = reported.get(commit.directory) or _damage(directory, sleep)
        if reason is None:
            return commit.directory, damages
        damages.append(Damage(commit, reason))
    return None, damages


def set_aside(
    paths: RunPaths,
    writer: IncarnationWriter,
    damages: list[Damage],
    events: EventWriter,
    calls: SystemCalls = REAL,
) -> None:
    """Delete damaged commits from the history; keep their files for inspection.

    Raises StaleIncarnationError, TrialEndedError.
    """
    for damage in damages:
        step, directory, reason = damage.commit.step, damage.commit.directory, damage.reason
        logger.warning("the checkpoint of step %d cannot be used: %s", step, reason)
        record = {"step": step, "directory": directory, "reason": reason}
        retry("delete a damaged checkpoint", partial(writer.append, Kind.DELETE, record))
        try:
            calls.rename(paths.checkpoints / directory, paths.damaged_checkpoint(directory))
        except OSError as error:  # already removed, or removed when an incarnation begins
            logger.warning("%s is not kept: %s", directory, error.strerror)
        events.write("damaged", directory=directory, step=step, reason=reason)


def _damage(directory: Path, sleep: Callable[[float], None]) -> str | None:
    """Describe the damage; None if there is none. Raises EnvironmentFailure."""
    try:
        until_certain(partial(verify, directory, checksums=False), sleep)
    except DamagedCheckpointError as error:
        return str(error)
    return None


def _reported_damage(names: NameStore, state: TrialState) -> dict[str, str]:
    """Return the reasons by directory of checkpoints that recent incarnations found damaged: ranks
    when loading, masters when exporting."""
    damage: dict[str, str] = {}
    for number in range(max(1, state.incarnation - LOOK_BACK + 1), state.incarnation + 1):
        failure = published.failure(names, number)
        if failure is not None and failure.damaged:
            damage[failure.damaged] = failure.exception or failure.reason
    return damage
