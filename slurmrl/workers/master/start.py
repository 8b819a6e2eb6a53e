"""Beginning an incarnation: win it in the history, judge whether trying again makes sense, and
restore what the last commit says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slurmrl import keys, log
from slurmrl.checkpoint.manifest import read_state
from slurmrl.errors import NameNotFoundError
from slurmrl.fsio import documents
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
    what: str = ""
    """The reason without the rank: which of several was first is a matter of luck."""

    @staticmethod
    def of(names: NameStore, incarnation: int) -> Failure | None:
        try:
            where = keys.failure(incarnation)
            said = documents.parse(names.get(where), where)
        except NameNotFoundError:
            return None
        what = said.get("exception") or said.get("reason") or "unknown"
        rank = ""
        if "rank" in said:
            rank, what = f"rank {said['rank']}, ", f"{said.get('call')}: {what}"
        return Failure(f"{rank}{what}", said.get("step"), said.get("traceback", ""), what)


def hopeless(records: list[Record], names: NameStore, max_begins: int) -> Failure | None:
    """Why another try would be in vain: the same exception of user code twice at one step, or too
    many incarnations in a row without a commit. ``records`` end with our own BEGIN."""
    state = fold(records)
    earlier = state.begins_without_commit - 1
    last = Failure.of(names, state.incarnation - 1) if earlier >= 1 else None
    if last is not None and last.traceback and not _resumed_since(records, state.incarnation - 2):
        before = Failure.of(names, state.incarnation - 2)
        if before is not None and (before.what, before.step) == (last.what, last.step):
            text = f"failed twice in the same way: {last.reason}"
            return Failure(text, last.step, last.traceback)
    if earlier >= max_begins:
        why = last.reason if last is not None else "its processes ended without a word"
        text = f"{earlier} starts in a row without a new commit; the last one: {why}"
        return Failure(text, None, last.traceback if last is not None else "")
    return None


def _resumed_since(records: list[Record], incarnation: int) -> bool:
    """Whether somebody has resumed the trial after that incarnation, perhaps having mended
    what was wrong."""
    return any(
        record.kind is Kind.RESUME and record.incarnation >= incarnation for record in records
    )


def restore(paths: RunPaths, state: TrialState) -> dict[str, Any] | None:
    """The committed state to go on from, or None at the very start."""
    if state.last_commit is None:
        return None
    return read_state(paths.checkpoints / state.last_commit.directory)


def give_up(writer: IncarnationWriter, failure: Failure) -> None:
    logger.error("the trial has failed: %s", failure.reason)
    writer.append(Kind.FAILED, {"reason": failure.reason, "traceback": failure.traceback})
