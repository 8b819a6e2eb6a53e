"""Commits (the ranks' files, the manifest, then the history slot) and deletion of old commits.

The master starts a checkpoint and then polls it while the ranks continue training. The checkpoint
counts only when the history names it. After a failure, the master removes its directory. An
`Outcome` reports success or failure.

An incarnation begins on the newest undamaged commit (`begin_on_base`). The BEGIN record names this
commit, so that all agents load the same commit. The master then deletes newer, damaged commits from
the history, with the reason, and sets their files aside.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slurmrl import log
from slurmrl.backoff import retry
from slurmrl.config.schema.config import Checkpoint
from slurmrl.errors import DamagedCheckpointError, EnvironmentFailure
from slurmrl.fsio.atomic import make_private_directory
from slurmrl.fsio.calls import DEFINITE, REAL, SystemCalls, cause
from slurmrl.name_resolve.store import NameStore
from slurmrl.run.events import EventWriter
from slurmrl.run.history.slots import History, Kind, Record
from slurmrl.run.history.state import Commit, IncarnationWriter, TrialState, begin
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.checkpoint.manifest import until_certain, verify, write_manifest
from slurmrl.watch import published
from slurmrl.watch.checkpoints import kept_by
from slurmrl.workers.master.worker_channel import WorkerChannel
from slurmrl.workers.messages import Save, Saved

logger = log.get(__name__)


@dataclass(frozen=True)
class Outcome:
    """The result of a checkpoint."""

    step: int
    seconds: float
    """Duration from the start of the checkpoint to its end."""
    stall_s: float
    """Time for which training waited, because ranks copied weights or the master was blocked. File
    operations of the master while the ranks work do not count."""
    error: str | None = None
    """Reason of the failure; None if the checkpoint is committed."""


@dataclass
class Writing:
    """The checkpoint that the ranks are writing."""

    step: int
    directory: Path
    state: dict[str, Any]
    number: int
    """Number of the `Save` order."""
    began: float
    asynchronous: bool
    stall_s: float = 0.0


class Committer:
    """Writes one checkpoint at a time. ``sync`` flushes files to disk before a commit."""

    def __init__(
        self,
        paths: RunPaths,
        writer: IncarnationWriter,
        channel: WorkerChannel,
        commits: tuple[Commit, ...],
        settings: Checkpoint,
        timeout_s: float,
        sync: Callable[[], None] = lambda: None,
    ) -> None:
        self.paths = paths
        self.writer = writer
        self.channel = channel
        self.commits = list(commits)
        self.settings = settings
        self.timeout_s = timeout_s
        self._sync = sync
        self._writing: Writing | None = None

    @property
    def last_step(self) -> int | None:
        return self.commits[-1].step if self.commits else None

    # -- one checkpoint ----------------------------------------------------------------------

    def start(self, step: int, state: dict[str, Any], *, asynchronous: bool) -> Outcome | None:
        """Tell the ranks to save ``step``. The previous checkpoint must have ended (`wait`).

        Return an outcome only if the checkpoint cannot be started, else None.
        """
        assert self._writing is None, "one checkpoint at a time"
        began = time.monotonic()
        directory = self.paths.checkpoint(step, self.writer.incarnation)
        save = Save(step=step, directory=directory.name, asynchronous=asynchronous)
        writing = Writing(step, directory, deepcopy(state), -1, began, asynchronous)
        try:
            make_private_directory(directory)
        except EnvironmentFailure as error:
            return self._give_up(writing, str(error))
        (writing.number,) = self.channel.post(save)
        writing.stall_s = time.monotonic() - began
        self._writing = writing
        return None

    def poll(self) -> Outcome | None:
        """Commit if all ranks have saved. Return None until then, and without a checkpoint."""
        if self._writing is None:
            return None
        answers = self.channel.saved(self._writing.number)
        if answers is None:
            return None
        writing, self._writing = self._writing, None
        if writing.asynchronous:
            writing.stall_s += max(done.seconds for done, _ in answers)
        return self._finish(writing, [saved for _, saved in answers])

    def wait(self) -> Outcome | None:
        """Wait until the current checkpoint ends; return None without a checkpoint.

        Raises WaitTimeoutError, StaleIncarnationError, TrialEndedError.
        """
        writing = self._writing
        if writing is None:
            return None
        began = time.monotonic()
        what = f"saving step {writing.step}"
        self.channel.wait_saved(writing.number, what, self.timeout_s)
        writing.stall_s += time.monotonic() - began
        return self.poll()

    def _finish(self, writing: Writing, answers: Sequence[Saved]) -> Outcome:
        failed = next((saved for saved in answers if saved.error), None)
        if failed is not None:
            return self._give_up(writing, f"rank {failed.rank}: {failed.error}")
        files = [file for saved in answers for file in saved.files]
        try:
            self._sync()
            write_manifest(writing.directory, step=writing.step, files=files, state=writing.state)
        except EnvironmentFailure as error:
            return self._give_up(writing, str(error))
        return self._name(writing)

    def _name(self, writing: Writing) -> Outcome:
        """Write the COMMIT record. Retry while it is unclear whether the record was written.

        Keep the directory until this is clear. Writing the record twice has no effect.
        """
        return retry(f"commit step {writing.step}", lambda: self._win_slot(writing))

    def _win_slot(self, writing: Writing) -> Outcome:
        """Write the COMMIT record. Raises EnvironmentFailure if the outcome is unclear."""
        directory = writing.directory.name
        try:
            record = self.writer.append(Kind.COMMIT, {"step": writing.step, "directory": directory})
        except EnvironmentFailure as error:
            state = retry("read the history", self.writer.check)
            for commit in state.commits:
                if commit.directory == directory:
                    return self._committed(writing, commit)
            if cause(error) in DEFINITE:
                return self._give_up(writing, str(error))
            raise
        return self._committed(
            writing, Commit(writing.step, directory, record.incarnation, record.data)
        )

    def _committed(self, writing: Writing, commit: Commit) -> Outcome:
        self.commits.append(commit)
        logger.info("committed step %d", commit.step)
        self._delete_old()
        return self._outcome(writing)

    def _give_up(self, writing: Writing, reason: str) -> Outcome:
        """Remove the files of a failed checkpoint at once, because the disk may be full.

        Also remove the files of damaged commits that were set aside. Never remove commits to free
        space.
        """
        logger.warning("cannot commit step %d: %s", writing.step, reason)
        for directory in (writing.directory, *self.paths.damaged_checkpoints()):
            shutil.rmtree(directory, ignore_errors=True)
        return self._outcome(writing, reason)

    def _outcome(self, writing: Writing, error: str | None = None) -> Outcome:
        """Return the outcome. Waits and copies may overlap, so limit the stall to the duration."""
        seconds = time.monotonic() - writing.began
        return Outcome(writing.step, seconds, min(writing.stall_s, seconds), error)

    # -- old checkpoints ---------------------------------------------------------------------

    def _delete_old(self) -> None:
        reasons = kept_by(self.commits, self.settings.keep_last, self.settings.keep_every_steps)
        for commit in [one for one in self.commits if not reasons[one.directory]]:
            self._delete(commit)

    def _delete(self, commit: Commit) -> None:
        """Delete a commit from the history, then from disk. The next commit retries on failure."""
        try:
            self.writer.append(Kind.DELETE, {"step": commit.step, "directory": commit.directory})
        except EnvironmentFailure as error:
            logger.warning("cannot delete the checkpoint of step %d: %s", commit.step, error)
            return
        self.commits.remove(commit)
        shutil.rmtree(self.paths.checkpoints / commit.directory, ignore_errors=True)


LOOK_TIMEOUT_S = 300.0
"""Timeout for checking the checkpoints if the directory does not answer."""
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
    futile: Callable[[list[Record]], dict[str, Any] | None],
) -> tuple[IncarnationWriter, list[Damage]]:
    """Begin an incarnation on the newest usable commit; also return newer, damaged commits.

    Raises EnvironmentFailure and the errors of `begin`.
    """
    damages: list[Damage] = []

    def describe(state: TrialState) -> dict[str, Any]:
        base, damages[:] = retry(
            "check the checkpoints", lambda: choose(paths, names, state), timeout_s=LOOK_TIMEOUT_S
        )
        return {**data, "base": base}

    return begin(history, describe, futile), damages


def choose(
    paths: RunPaths,
    names: NameStore,
    state: TrialState,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[str | None, list[Damage]]:
    """Return the newest usable commit's directory, or None, and the damage of newer commits.

    Check file sizes, and use the reports of ranks about wrong checksums.
    """
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
        except OSError as error:  # The next incarnation removes the directory if it still exists.
            logger.warning("cannot set %s aside: %s", directory, error.strerror)
        events.write("damaged", directory=directory, step=step, reason=reason)


def _damage(directory: Path, sleep: Callable[[float], None]) -> str | None:
    """Return a description of a checkpoint's damage, or None. Raises EnvironmentFailure."""
    try:
        until_certain(partial(verify, directory, checksums=False), sleep)
    except DamagedCheckpointError as error:
        return str(error)
    return None


def _reported_damage(names: NameStore, state: TrialState) -> dict[str, str]:
    """Map the directories of checkpoints to the damage that recent incarnations reported.

    Ranks find damage when they load a checkpoint, masters when they export a checkpoint.
    """
    damage: dict[str, str] = {}
    for number in range(max(1, state.incarnation - LOOK_BACK + 1), state.incarnation + 1):
        failure = published.failure(names, number)
        if failure is not None and failure.damaged:
            damage[failure.damaged] = failure.exception or failure.reason
    return damage
