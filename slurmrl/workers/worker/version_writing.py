"""This rank's part of weight versions: copied to host memory at once, written by a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from slurmrl.engines.base import Engine
from slurmrl.engines.versions import OwnedTensors
from slurmrl.models.storage import file_form
from slurmrl.plan.model import Plan
from slurmrl.plan.model_files import config_values
from slurmrl.plan.settings import Settings
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.checkpoint.stored import by_name
from slurmrl.tensors.checkpoint.tensors import SavedFile, TensorEntry
from slurmrl.tensors.layout.copy import Array
from slurmrl.tensors.parallel.device import Accelerator
from slurmrl.tensors.transfer.regions import PlacedLayout
from slurmrl.tensors.weights.version import VersionId, part_file, part_index
from slurmrl.tensors.weights.writer import PartWriter, VersionBits
from slurmrl.workers.messages import Saved, WriteVersion
from slurmrl.workers.worker.saver import Saver

ACTOR = "actor"


@dataclass(frozen=True)
class VersionPart:
    """The tensors that a rank owns of a version, in host memory. With a ``base``, the part stores
    what has changed since then."""

    number: int
    version: VersionId
    entries: Sequence[TensorEntry]
    base: VersionBits | None
    frozen: str | None = None
    """See `VersionManifest.frozen`."""

    def bits(self) -> VersionBits:
        return VersionBits(self.version, {entry.name: _bits(entry) for entry in self.entries})

    def paths(self, directory: Path) -> list[Path]:
        return [directory / part_file(self.number), directory / part_index(self.number)]

    def write(self, directory: Path) -> list[SavedFile]:
        """Write the part and its index, durably; the index lists the file. Raises
        EnvironmentFailure."""
        with PartWriter(directory, self.number, self.base, frozen=self.frozen) as writer:
            for entry in self.entries:
                writer.add(entry.name, entry.spec.dtype, entry.spec.shape, _bits(entry))
            writer.finish()
        return []


class VersionWriting:
    """Writes this rank's parts, one at a time. ``parts`` is None on a rank without weights of the
    actor."""

    def __init__(
        self, folder: Path, rank: int, parts: OwnedTensors | None, frozen: str | None = None
    ) -> None:
        """``frozen``: the fingerprint of the weights that versions leave out."""
        self._folder = folder
        self._rank = rank
        self._parts, self._frozen = parts, frozen
        self._saver = Saver(rank)
        self._last: VersionBits | None = None

    def write(
        self, order: WriteVersion, engine: Engine | None, say: Callable[[Saved], None]
    ) -> None:
        """Copy the weights of now. Collective over the actor's ranks. ``say`` receives `Saved` once
        the part is on disk, perhaps from a thread."""
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
        self._saver.start([part], self._folder / version.name, order.seq, say)

    def wait(self) -> None:
        """Wait until nothing is being written. Raises the exception of a bug in the writing."""
        self._saver.wait()


def prepare(
    settings: Settings,
    plan: Plan,
    engines: Mapping[str, Engine],
    paths: RunPaths,
    rank: int,
    accelerator: Accelerator,
    timeout: timedelta,
) -> VersionWriting | None:
    """This rank's writing of versions; None if the trial publishes none. Collective over all
    ranks. ``timeout`` bounds one collective."""
    publish = settings.config.rollout.publish
    if publish is None:
        return None
    ranks, device = plan.models[ACTOR].ranks, accelerator.device
    group = dist.new_group(ranks, timeout=timeout)
    engine = engines.get(ACTOR)
    if engine is None:
        return VersionWriting(paths.versions, rank, None)
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # NCCL: all ranks come first
    per_host, model = plan.trainers.workers_per_host, settings.config.actor
    _, storage = file_form(config_values(model), model.implementation, engine.head)
    dtype = model.dtype
    if engine.frozen is not None:  # adapters, as checkpoints hold them
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
