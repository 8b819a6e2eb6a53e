"""Beginning an incarnation: win it in the history, judge whether trying again makes sense, and
restore what the last commit says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from slurmrl import keys, log
from slurmrl.checkpoint.manifest import read_state
from slurmrl.errors import NameNotFoundError
from slurmrl.history.record import Kind, Record
from slurmrl.history.state import TrialState, fold
from slurmrl.history.writer import IncarnationWriter
from slurmrl.name_resolve.base import NameStore
from slurmrl.paths import RunPaths

logger = log.get(__name__)


@dataclass(frozen=True)
class Failure:
    """Why an incarnation failed, as its first failing rank said."""

    reason: str
    step: int | None
    traceback: str

    @staticmethod
    def of(names: NameStore, incarnation: int) -> Failure | None:
        try:
            said: dict[str, Any] = json.loads(names.get(keys.failure(incarnation)))
        except NameNotFoundError:
            return None
        reason = said.get("exception") or said.get("reason") or "unknown"
        where = f"rank {said['rank']}, {said['call']}: " if "rank" in said else ""
        return Failure(f"{where}{reason}", said.get("step"), said.get("traceback", ""))


def hopeless(records: list[Record], names: NameStore, max_begins: int) -> Failure | None:
    """Why another try would be in vain: the same exception of user code twice at one step, or too
    many incarnations in a row without a commit. ``records`` end with our own BEGIN."""
    state = fold(records)
    earlier = state.begins_without_commit - 1
    last = Failure.of(names, state.incarnation - 1) if earlier >= 1 else None
    if last is not None and last.traceback and earlier >= 2:
        before = Failure.of(names, state.incarnation - 2)
        if before is not None and (before.reason, before.step) == (last.reason, last.step):
            text = f"failed twice in the same way: {last.reason}"
            return Failure(text, last.step, last.traceback)
    if earlier >= max_begins:
        why = last.reason if last is not None else "its processes ended without a word"
        text = f"{earlier} starts in a row without a new commit; the last one: {why}"
        return Failure(text, None, last.traceback if last is not None else "")
    return None


def restore(paths: RunPaths, state: TrialState) -> dict[str, Any] | None:
    """The committed state to go on from, or None at the very start."""
    if state.last_commit is None:
        return None
    return read_state(paths.checkpoints / state.last_commit.directory)


def give_up(writer: IncarnationWriter, failure: Failure) -> None:
    logger.error("the trial has failed: %s", failure.reason)
    writer.append(Kind.FAILED, {"reason": failure.reason, "traceback": failure.traceback})
