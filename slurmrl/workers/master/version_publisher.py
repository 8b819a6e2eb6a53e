"""Publication of weight versions (the ranks' parts, then the manifest) and removal of old versions.

The master starts a publication and then polls it while the ranks continue training. The version
exists once its manifest exists. After a failure, the master removes the version's directory. A
`Publication` reports success or failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmrl import log
from slurmrl.backoff import HIDDEN_PAUSES_S, attempts
from slurmrl.config.schema import Publish
from slurmrl.errors import EnvironmentFailure, WeightVersionError
from slurmrl.fsio.atomic import list_names, make_private_directory
from slurmrl.fsio.calls import REAL
from slurmrl.run.history.state import Lineage
from slurmrl.tensors.weights.format import MANIFEST, PartIndex, VersionId, read_part, version_ids
from slurmrl.tensors.weights.inventory import prune, remove
from slurmrl.tensors.weights.writer import publish
from slurmrl.workers.master.worker_channel import WorkerChannel
from slurmrl.workers.messages import Saved, WriteVersion

logger = log.get(__name__)


@dataclass(frozen=True)
class Publication:
    """The result of the publication of a version."""

    version: VersionId
    base: VersionId | None
    seconds: float
    """Duration of the publication."""
    stall_s: float
    """Time for which training waited because ranks copied weights or the master was blocked."""
    bytes: int = 0
    error: str | None = None
    """Reason of the failure; None if the version is published."""


@dataclass
class _Writing:
    """The version that the ranks are writing."""

    version: VersionId
    base: VersionId | None
    number: int
    """Number of the `WriteVersion` order."""
    began: float
    stall_s: float = 0.0
    distrusted: bool = False
    """Whether the version builds on a version that cannot be read."""


class VersionPublisher:
    """Publishes one version at a time in ``folder``; each of ``ranks`` writes a part.

    ``permit`` raises if this incarnation is not the newest incarnation. A version is full, not a
    delta, if it is the first version of an incarnation, or follows a failure or an unreadable
    version (`distrust`). In these cases, the ranks lack a usable base for a delta in their memory.
    """

    def __init__(
        self,
        folder: Path,
        channel: WorkerChannel,
        settings: Publish,
        ranks: Sequence[int],
        incarnation: int,
        timeout_s: float,
        permit: Callable[[], object],
    ) -> None:
        self._folder = folder
        self._channel = channel
        self._settings = settings
        self._ranks = ranks
        self._incarnation = incarnation
        self._timeout_s = timeout_s
        self._permit = permit
        self._writing: _Writing | None = None
        self._last: VersionId | None = None
        """Base for the next delta: the newest version if readable and in the ranks' memory."""
        self._newest: VersionId | None = None
        """The newest published version; None after a failure, or if tasks cannot read it."""
        self._chain: set[VersionId] = set()
        """The newest full version and the versions that build on it."""
        self._since_whole = 0

    def is_due(self, step: int) -> bool:
        return step % self._settings.every_steps == 0

    def distrust(self, versions: Collection[VersionId]) -> None:
        """Record that tasks cannot read these versions.

        Therefore tasks cannot read deltas that build on them. Ignore versions before the newest
        full version.
        """
        if not self._chain & set(versions):
            return
        self._last = None
        if self._writing is not None and self._writing.base is not None:
            self._writing.distrusted = True
        if self._newest in versions:
            self._newest = None

    @property
    def is_lacking(self) -> bool:
        """Whether tasks lack a readable newest version, and ranks are not writing a version.

        The publication has failed, tasks cannot read the version, or it was removed. Raises
        EnvironmentFailure.
        """
        if self._writing is not None:
            return False
        return self._newest is None or not _is_published(self._folder / self._newest.name)

    def start(self, step: int, *, again: bool = False) -> Publication | None:
        """Tell the ranks to write the version of ``step``, whose weights they have now.

        The previous publication must have ended (`wait`). With ``again``, the ranks write a full
        version that replaces an existing version of the step. Readers of the existing version then
        find it missing. Return an outcome only if the publication cannot be started, else None.
        """
        assert self._writing is None, "one version at a time"
        version = VersionId(step, self._incarnation)
        delta = not again and self._since_whole + 1 < self._settings.whole_every
        writing = _Writing(version, self._last if delta else None, -1, time.monotonic())
        try:
            if again:
                remove(self._folder, version)
            make_private_directory(self._folder / version.name)
        except EnvironmentFailure as error:
            return self._give_up(writing, str(error))
        base = None if writing.base is None else writing.base.name
        order = WriteVersion(step=step, version=version.name, base=base)
        (writing.number,) = self._channel.post(order)
        writing.stall_s = time.monotonic() - writing.began
        self._writing = writing
        return None

    def poll(self) -> Publication | None:
        """Publish if all ranks have written. Return None until then, and without a publication.

        Raises StaleIncarnationError, TrialEndedError.
        """
        if self._writing is None:
            return None
        answers = self._channel.saved(self._writing.number)
        if answers is None:
            return None
        writing, self._writing = self._writing, None
        writing.stall_s += max(done.seconds for done, _ in answers)
        return self._finish(writing, [saved for _, saved in answers])

    def wait(self) -> Publication | None:
        """Wait until the current publication ends; return None without a publication.

        Raises WaitTimeoutError and the errors of `poll`.
        """
        writing = self._writing
        if writing is None:
            return None
        began = time.monotonic()
        what = f"writing weight version {writing.version}"
        self._channel.wait_saved(writing.number, what, self._timeout_s)
        writing.stall_s += time.monotonic() - began
        return self.poll()

    def _finish(self, writing: _Writing, answers: Sequence[Saved]) -> Publication:
        failed = next((saved for saved in answers if saved.error), None)
        if failed is not None:
            return self._give_up(writing, f"rank {failed.rank}: {failed.error}")
        folder = self._folder / writing.version.name
        try:
            self._permit()
            manifest = publish(folder, self._parts(folder), writing.version, writing.base)
        except (EnvironmentFailure, WeightVersionError) as error:
            return self._give_up(writing, str(error))
        self._last = None if writing.distrusted else writing.version
        self._newest = writing.version
        self._chain = {writing.version} | (self._chain if writing.base is not None else set())
        self._since_whole = 0 if writing.base is None else self._since_whole + 1
        if writing.base is None:
            self._prune()
        return self._outcome(writing, written=manifest.bytes)

    def _parts(self, folder: Path) -> list[PartIndex]:
        """Return the parts that the ranks have written. Wait if this host cannot see them yet."""
        pauses_s = HIDDEN_PAUSES_S if REAL.caches(folder) else ()
        for last in attempts(pauses_s):
            try:
                return [read_part(folder, rank) for rank in self._ranks]
            except WeightVersionError:
                if last:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _prune(self) -> None:
        """After a new full version, remove versions that no reader needs."""
        try:
            prune(self._folder, self._settings.keep_whole)
        except EnvironmentFailure as error:  # The next full version retries.
            logger.warning("cannot remove old weight versions: %s", error)

    def _give_up(self, writing: _Writing, reason: str) -> Publication:
        """Remove the files of a failed version at once, because the disk may be full."""
        logger.warning("cannot publish weight version %s: %s", writing.version, reason)
        try:
            remove(self._folder, writing.version)
        except EnvironmentFailure as error:  # The next incarnation retries.
            logger.warning("cannot remove weight version %s: %s", writing.version, error)
        self._last = self._newest = None
        return self._outcome(writing, reason)

    def _outcome(
        self, writing: _Writing, error: str | None = None, *, written: int = 0
    ) -> Publication:
        """Return the outcome. Waits and copies may overlap, so limit the stall to the duration."""
        seconds = time.monotonic() - writing.began
        stall_s = min(writing.stall_s, seconds)
        return Publication(writing.version, writing.base, seconds, stall_s, written, error)


def remove_leftovers(folder: Path, lineage: Lineage, incarnation: int) -> None:
    """Remove leftovers of earlier incarnations. Raises EnvironmentFailure.

    These are versions without a manifest, and versions of steps that were rolled back.
    """
    for version in version_ids(folder):
        if version.incarnation >= incarnation:
            continue  # A newer master may be writing this version.
        rolled_back = not lineage.has(version.step, version.incarnation)
        if rolled_back or not _is_published(folder / version.name):
            remove(folder, version)


def _is_published(folder: Path) -> bool:
    """Return whether a version is published. Raises EnvironmentFailure."""
    try:
        return MANIFEST in list_names(folder)
    except FileNotFoundError:
        return False
