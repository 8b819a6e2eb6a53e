"""Writers of this rank's part of a checkpoint or a weight version.

A thread may write a part during training, after the rank has copied it to host memory.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from slurmrl import log
from slurmrl.engines.base import Engine
from slurmrl.engines.host import OwnedTensors
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio.calls import REAL, discard
from slurmrl.models.shapes import file_form
from slurmrl.plan.estimates.shape import config_values
from slurmrl.plan.model import Plan
from slurmrl.plan.settings import Settings
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.checkpoint.tensors import SavedFile, TensorEntry, by_name
from slurmrl.tensors.layout import Array
from slurmrl.tensors.parallel.device import Accelerator
from slurmrl.tensors.transfer.plan import PlacedLayout
from slurmrl.tensors.weights.format import VersionId, part_file, part_index
from slurmrl.tensors.weights.writer import PartWriter, VersionBits
from slurmrl.workers.messages import Saved, WriteVersion

logger = log.get(__name__)
ACTOR = "actor"


class Snapshot(Protocol):
    """A copy of weights, which any thread may write."""

    def paths(self, directory: Path) -> list[Path]:
        """Return the files that `write` makes."""
        ...

    def write(self, directory: Path) -> list[SavedFile]:
        """Write the files durably. Raises EnvironmentFailure."""
        ...


class Saver:
    """Writes the snapshots of one order at a time, then sends `Saved` with the files.

    If the directory rejects the files, `Saved` contains the error, and the run continues. `wait`
    raises any other exception again, because it is a bug.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._thread: threading.Thread | None = None
        self._bug: Exception | None = None

    def write(
        self,
        snapshots: Sequence[Snapshot],
        directory: Path,
        seq: int,
        say: Callable[[Saved], None],
        *,
        asynchronous: bool,
    ) -> None:
        """Write the files, then call ``say``. If ``asynchronous``, a thread does both."""

        def run() -> None:
            say(self._write(snapshots, directory, seq))

        if asynchronous:
            self._thread = threading.Thread(target=run, name="saver", daemon=True)
            self._thread.start()
        else:
            run()
            self.wait()

    def wait(self) -> None:
        """Wait until all files are written. Raises an unexpected exception of the thread."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._bug is not None:
            raise self._bug

    def _write(self, snapshots: Sequence[Snapshot], directory: Path, seq: int) -> Saved:
        saved = Saved(rank=self._rank, seq=seq)
        try:
            files = tuple(file for each in snapshots for file in each.write(directory))
        except EnvironmentFailure as error:
            logger.warning("%s", error)
            for path in (path for each in snapshots for path in each.paths(directory)):
                discard(path, REAL)  # Free space on a full disk for the error report.
            return replace(saved, error=str(error))
        except Exception as error:  # noqa: BLE001 - a thread's boundary: the rank raises it
            traceback.print_exc()
            self._bug = error
            return replace(saved, error=f"{type(error).__name__}: {error}")
        return replace(saved, files=files)


@dataclass(frozen=True)
class VersionPart:
    """The tensors of a version that a rank owns, in host memory.

    With a ``base``, the part stores the differences from that version.
    """

    number: int
    version: VersionId
    entries: Sequence[TensorEntry]
    base: VersionBits | None
    frozen: str | None = None
    """Fingerprint of the frozen weights (see `VersionManifest.frozen`)."""

    def bits(self) -> VersionBits:
        return VersionBits(self.version, {entry.name: _bits(entry) for entry in self.entries})

    def paths(self, directory: Path) -> list[Path]:
        return [directory / part_file(self.number), directory / part_index(self.number)]

    def write(self, directory: Path) -> list[SavedFile]:
        """Write the part and its index durably. Raises EnvironmentFailure.

        Return no files, because the index already names the file.
        """
        with PartWriter(directory, self.number, self.base, frozen=self.frozen) as writer:
            for entry in self.entries:
                writer.add(entry.name, entry.spec.dtype, entry.spec.shape, _bits(entry))
            writer.finish()
        return []


class VersionWriting:
    """Writes this rank's parts of weight versions, one at a time."""

    def __init__(
        self, folder: Path, rank: int, parts: OwnedTensors | None, frozen: str | None = None
    ) -> None:
        """``parts`` is None on a rank without weights of the actor.

        ``frozen`` is the fingerprint of the frozen weights, which versions omit.
        """
        self._folder = folder
        self._rank = rank
        self._parts, self._frozen = parts, frozen
        self._saver = Saver(rank)
        self._last: VersionBits | None = None

    def write(
        self, order: WriteVersion, engine: Engine | None, say: Callable[[Saved], None]
    ) -> None:
        """Copy the current weights and begin to write them. Collective over the actor's ranks.

        ``say`` receives `Saved` when the part is on disk, perhaps from another thread.
        """
        if self._parts is None or engine is None:
            say(Saved(rank=self._rank, seq=order.seq))
            return
        self._saver.wait()
        version = VersionId.parse(order.version)
        base = self._last if order.base is not None else None
        assert (None if base is None else base.version.name) == order.base, "another base"
        entries = self._parts.take(engine.trained_storages())
        part = VersionPart(self._rank, version, entries, base, self._frozen)
        self._last = part.bits()
        folder = self._folder / version.name
        self._saver.write([part], folder, order.seq, say, asynchronous=True)

    def wait(self) -> None:
        """Wait until all parts are written. Raises as `Saver.wait`."""
        self._saver.wait()


def prepare_versions(
    settings: Settings,
    plan: Plan,
    engines: Mapping[str, Engine],
    paths: RunPaths,
    rank: int,
    accelerator: Accelerator,
    timeout: timedelta,
) -> VersionWriting | None:
    """Return this rank's writer of versions; None if the trial publishes no versions.

    Collective over all ranks. ``timeout`` is the time-out of one collective.
    """
    publish = settings.config.rollout.publish
    if publish is None:
        return None
    ranks, device = plan.models[ACTOR].ranks, accelerator.device
    group = dist.new_group(ranks, timeout=timeout)
    engine = engines.get(ACTOR)
    if engine is None:
        return VersionWriting(paths.versions, rank, None)
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # Connect all ranks.
    per_host, model = plan.trainers.workers_per_host, settings.config.actor
    _, storage = file_form(config_values(model), model.implementation, engine.head)
    dtype = model.dtype
    if engine.frozen is not None:  # Weight versions store adapters in the checkpoints' form.
        storage, dtype = by_name, "float32"
    parts = OwnedTensors(
        PlacedLayout(engine.trained_layout(), ranks),
        storage,
        dtype,
        hosts={member: member // per_host for member in ranks},
        staging_bytes=settings.config.transfer.staging_mib * 2**20,
        group=group,
        device=device,
        copies=publish.copies,
    )
    return VersionWriting(paths.versions, rank, parts, engine.frozen)


def _bits(entry: TensorEntry) -> Array:
    return entry.data().reshape(-1).view(np.uint8)
