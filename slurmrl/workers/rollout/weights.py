"""The weights of a rollout task: a model folder of each version that its engine is to serve."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from slurmrl.errors import WeightVersionError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.failures import explain
from slurmrl.models.hf import CONFIG_FILE
from slurmrl.rollouts.generation.base import WeightVersion
from slurmrl.tensors.checkpoint.export import write_json
from slurmrl.tensors.weights.local_copy import FILE, CopiedVersion, LocalCopy
from slurmrl.tensors.weights.version import MANIFEST, VersionId, version_ids
from slurmrl.workers.rollout.merging import MergingHost

Stamp: TypeAlias = tuple[int, int]
"""Inode and time of a manifest: others when a version is published anew."""


class TaskWeights:
    """Follows the published versions. Those of a later incarnation of the trainers are newer, even
    if it began at an older step, so after a rollback the task goes to what holds now."""

    def __init__(
        self,
        versions: Path,
        folder: Path,
        config: Mapping[str, Any],
        merging: MergingHost | None = None,
        *,
        calls: SystemCalls = REAL,
    ) -> None:
        """``folder``: of this task alone, in the host's memory or on a local disk; ``config``: the
        model's ``config.json``; ``merging``: of a model that trains adapters."""
        self._versions, self._folder, self._config = versions, folder, config
        self._merging = merging
        self._copy = LocalCopy(folder / "copy", versions, calls=calls)
        self._calls = calls
        self._held: VersionId | None = None
        self._refused: dict[VersionId, Stamp] = {}
        """Versions that cannot be read."""
        self.unreadable: list[tuple[VersionId, str]] = []
        """What was refused, and why; for the caller to empty."""

    def newer(self) -> WeightVersion | None:
        """The newest version that can be read, if it is newer than the last one returned.

        Its folder stays until `drop_others`. Raises EnvironmentFailure, and UsageError and
        CorruptFileError of frozen weights that cannot be used.
        """
        for version, stamp in self._published():
            try:
                copied = self._copy.advance(version)
                folder = self._model_folder(copied)
            except WeightVersionError as error:  # the copy has logged why
                self._refused[version] = stamp
                self.unreadable.append((version, str(error)))
                continue
            self._held = copied.id
            return WeightVersion(name=copied.id.name, folder=folder)
        return None

    def drop_others(self, version: WeightVersion) -> None:
        """Remove the folders of other versions: the engine serves this one."""
        for name in atomic.list_names(self._models, calls=self._calls):
            if name != version.name:
                shutil.rmtree(self._models / name, ignore_errors=True)

    @property
    def _models(self) -> Path:
        return self._folder / "models"

    def _published(self) -> Iterator[tuple[VersionId, Stamp]]:
        """Newer versions, from new to old; those that were refused only when they are published
        anew."""
        for version in reversed(version_ids(self._versions, calls=self._calls)):
            if self._held is not None and not self._held < version:
                return
            stamp = self._stamp(version)
            if stamp is not None and stamp != self._refused.get(version):
                yield version, stamp

    def _stamp(self, version: VersionId) -> Stamp | None:
        """None if it is not published, or not any more."""
        folder = self._versions / version.name
        try:
            if MANIFEST not in atomic.list_names(folder, calls=self._calls):
                return None
            found = self._calls.stat(folder / MANIFEST)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise explain(error, "read", folder) from error
        return found.st_ino, found.st_mtime_ns

    def _model_folder(self, copied: CopiedVersion) -> Path:
        """A folder that keeps the weights when the copy moves on, and has the configuration that
        servers read. (They get the tokenizer by an argument.)"""
        folder = self._models / copied.id.name
        shutil.rmtree(folder, ignore_errors=True)
        atomic.make_private_directory(folder, calls=self._calls)
        if copied.frozen is None:
            self._link(copied, folder)
        elif self._merging is None:
            raise WeightVersionError(f"version {copied.id} holds adapters, and actor.lora is unset")
        else:
            self._merging.write(copied, folder)
        write_json(folder / CONFIG_FILE, self._config, self._calls)
        return folder

    def _link(self, copied: CopiedVersion, folder: Path) -> None:
        try:
            self._calls.link(copied.file, folder / FILE)
        except OSError as error:
            raise explain(error, "link", copied.file) from error
