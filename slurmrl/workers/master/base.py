"""The commit that an incarnation goes on from: the newest one that is as it was written.

Which one that is stands in BEGIN, so that all agents take the same. Newer ones that are damaged are
deleted from the history right after it, with the reason, and their files set aside.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slurmrl import log
from slurmrl.backoff import HIDDEN_PAUSES_S, attempts, retry
from slurmrl.checkpoint.manifest import verify
from slurmrl.errors import DamagedCheckpointError
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.local import is_local
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
"""Longest time in which the directory may not answer while checkpoints are looked at."""
LOOK_BACK = 3
"""Incarnations whose failures may name a damaged checkpoint that is still in the history."""


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
    """Begin an incarnation on the newest commit that can be used; also returns the newer ones that
    cannot. Raises as `begin`, and EnvironmentFailure."""
    damages: list[Damage] = []

    def describe(state: TrialState) -> dict[str, Any]:
        base, damages[:] = retry(
            "look at the checkpoints",
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
    """The directory of the newest commit that can be used, None if there is none; and what is wrong
    with those before it. Files' sizes are looked at here; for checksums, ranks have spoken."""
    damages: list[Damage] = []
    said = _said_by_ranks(names, state)
    for commit in reversed(state.commits):
        directory = paths.checkpoints / commit.directory
        reason = said.get(commit.directory) or _damage(directory, sleep)
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
    """Delete damaged commits from the history and keep their files for people to look at.

    Raises StaleIncarnationError, TrialEndedError.
    """
    for damage in damages:
        step, directory, reason = damage.commit.step, damage.commit.directory, damage.reason
        logger.warning("the checkpoint of step %d cannot be used: %s", step, reason)
        record = {"step": step, "directory": directory, "reason": reason}
        retry("delete a damaged checkpoint", partial(writer.append, Kind.DELETE, record))
        try:
            calls.rename(paths.checkpoints / directory, paths.damaged_checkpoint(directory))
        except OSError as error:  # it is gone, or goes when an incarnation begins
            logger.warning("%s is not kept: %s", directory, error.strerror)
        events.write("damaged", directory=directory, step=step, reason=reason)


def _damage(directory: Path, sleep: Callable[[float], None]) -> str | None:
    """What is wrong. Where caches can lie it is looked at until they cannot any more: a good
    checkpoint must not be given up."""
    reason = None
    for _ in attempts(() if is_local(directory.parent) else HIDDEN_PAUSES_S, sleep):
        try:
            verify(directory, checksums=False)
        except DamagedCheckpointError as error:
            reason = str(error)
        else:
            return None
    return reason


def _said_by_ranks(names: NameStore, state: TrialState) -> dict[str, str]:
    """What ranks of the last incarnations found damaged when they loaded it, and their masters when
    they exported it."""
    found: dict[str, str] = {}
    for number in range(max(1, state.incarnation - LOOK_BACK + 1), state.incarnation + 1):
        said = published.failure(names, number)
        if "damaged" in said:
            found[str(said["damaged"])] = str(said.get("exception") or said.get("reason"))
    return found
