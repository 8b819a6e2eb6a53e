"""The weights of a rollout task: a model folder for each version that its engine serves.

If versions consist of adapters, the task merges them with the frozen weights like the trainers. The
task reads the frozen weights once, from ``actor.path``, and keeps them in its host's memory,
rounded like the trainers' weights. The task merges only if its fingerprint of the frozen weights
equals the fingerprint in the version.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from slurmrl import log
from slurmrl.config.schema import Lora
from slurmrl.engines.fsdp.parameters import merged_weight
from slurmrl.engines.role_weights import Fingerprint
from slurmrl.errors import EnvironmentFailure, UnreadableInputError, UsageError, WeightVersionError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, SystemCalls, explain
from slurmrl.models.adapters import LORA_A, LORA_B, adapted_weights, matrix_name, trained_shapes
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.hf import CONFIG_FILE, Weights, as_array, as_tensor
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_targets import adapted_tensors
from slurmrl.models.model_tensors import open_folder
from slurmrl.models.shapes import Shapes, constant_specs, storage_of, stored_shapes
from slurmrl.rollouts.generation.base import WeightVersion
from slurmrl.tensors.checkpoint.export import write_index, write_json
from slurmrl.tensors.checkpoint.tensors import TensorEntry, TensorFile, file_entries, write_tensors
from slurmrl.tensors.layout import Array, Box, TensorSpec
from slurmrl.tensors.weights.format import MANIFEST, VersionId, version_ids
from slurmrl.tensors.weights.local_copy import FILE, CopiedVersion, LocalCopy

Stamp: TypeAlias = tuple[int, int]
"""Inode and time of a manifest. They change when a version is published again."""
logger = log.get(__name__)
SHARED = "model-00001-of-00002.safetensors"
"""File with the weights that have no adapters. The folders of all versions link to this file."""
ADAPTED = "model-00002-of-00002.safetensors"
"""File with the weights that have adapters: merged in a version's folder, otherwise frozen."""
METADATA = {"format": "pt"}


class TaskWeights:
    """Model folders of the published versions.

    Versions of a later incarnation of the trainers count as newer, even with a lower step. Thus the
    task loads the valid version after a rollback.
    """

    def __init__(
        self,
        versions: Path,
        folder: Path,
        config: Mapping[str, Any],
        merging: MergingHost | None = None,
        *,
        calls: SystemCalls = REAL,
    ) -> None:
        """Read versions from ``versions`` into ``folder``.

        ``folder`` is private to this task, in the host's memory or on a local disk. ``config`` is
        the model's ``config.json``. ``merging`` is for a model that trains adapters.
        """
        self._versions, self._folder, self._config = versions, folder, config
        self._merging = merging
        self._copy = LocalCopy(folder / "copy", versions, calls=calls)
        self._calls = calls
        self._held: VersionId | None = None
        self._rejected: dict[VersionId, Stamp] = {}
        """Versions that this host cannot read."""
        self.unreadable: list[tuple[VersionId, str]] = []
        """Newly rejected versions with the reasons; the caller empties this list."""

    def newer(self) -> WeightVersion | None:
        """Return the newest readable version, or None if the last call returned the same version.

        The version's folder exists until `drop_others`. Raises EnvironmentFailure, and UsageError
        or CorruptFileError if the frozen weights cannot be used.
        """
        for version, stamp in self._published():
            try:
                copied = self._copy.advance(version)
                folder = self._model_folder(copied)
            except WeightVersionError as error:  # `LocalCopy` has logged the reason.
                self._rejected[version] = stamp
                self.unreadable.append((version, str(error)))
                continue
            self._held = copied.id
            return WeightVersion(name=copied.id.name, folder=folder)
        return None

    def drop_others(self, version: WeightVersion) -> None:
        """Remove the folders of other versions, because the engine serves this version."""
        for name in atomic.list_names(self._models, calls=self._calls):
            if name != version.name:
                shutil.rmtree(self._models / name, ignore_errors=True)

    @property
    def _models(self) -> Path:
        return self._folder / "models"

    def _published(self) -> Iterator[tuple[VersionId, Stamp]]:
        """Yield versions that are newer than the current version, the newest first.

        Omit rejected versions that were not published again.
        """
        for version in reversed(version_ids(self._versions, calls=self._calls)):
            if self._held is not None and not self._held < version:
                return
            stamp = self._stamp(version)
            if stamp is not None and stamp != self._rejected.get(version):
                yield version, stamp

    def _stamp(self, version: VersionId) -> Stamp | None:
        """Return the stamp of a version; None if the version is not published."""
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
        """Make a folder with the weights and ``config.json``; return its path.

        The folder keeps the weights when the copy changes to another version.
        """
        folder = self._models / copied.id.name
        shutil.rmtree(folder, ignore_errors=True)
        atomic.make_private_directory(folder, calls=self._calls)
        if copied.frozen is None:
            self._link(copied, folder)
        elif self._merging is None:
            raise WeightVersionError(f"version {copied.id} has adapters, but actor.lora is not set")
        else:
            self._merging.write(copied, folder)
        write_json(folder / CONFIG_FILE, self._config, self._calls)
        return folder

    def _link(self, copied: CopiedVersion, folder: Path) -> None:
        try:
            self._calls.link(copied.file, folder / FILE)
        except OSError as error:
            raise explain(error, "link", copied.file) from error


class MergingHost:
    """Merges the adapters of each version with the frozen weights on this host."""

    def __init__(
        self,
        source: Path,
        folder: Path,
        config: ModelConfig | HFConfig,
        dtype: str,
        lora: Lora,
        device: torch.device,
        *,
        calls: SystemCalls = REAL,
    ) -> None:
        """Merge adapters of versions with frozen weights on ``device``.

        ``source`` is the folder of ``actor.path``. ``folder`` is private to this task, in the
        host's memory or on a local disk. ``dtype`` is the dtype of frozen and merged weights.
        """
        self._source, self._folder = source, folder
        self._config, self._dtype, self._device = config, dtype, device
        self._scale = lora.scale
        self._shapes: Shapes
        self._trained: Shapes
        if isinstance(config, ModelConfig):
            self._shapes = dict(adapted_weights(config, lora))
            self._trained = trained_shapes(config, "lm", lora)
        else:
            from slurmrl.models import hf_adapters  # Importing transformers is slow.

            self._shapes = hf_adapters.adapted_shapes(config.values, "lm", lora)
            self._trained = hf_adapters.adapter_shapes(config.values, "lm", lora)
        self._adapted = {name: name for name in self._shapes}
        """Mapping from the file's name of a weight with adapters to its name in the model."""
        self._calls = calls
        self._fingerprint: str | None = None
        """Fingerprint of the frozen weights in the folder; None before the first read."""

    def write(self, version: CopiedVersion, target: Path) -> None:
        """Write the merged weights of a version into the folder ``target``.

        Raises:
            WeightVersionError: the version's adapters do not fit the model.
            UsageError: the source is missing or differs from the trainers' frozen weights.
            CorruptFileError: a file of the source is damaged.
            EnvironmentFailure: the directory fails.
        """
        with_adapters = version.open()
        found = {name: (spec.shape, spec.dtype) for name, spec in with_adapters.specs.items()}
        if found != {name: (shape, "float32") for name, shape in self._trained.items()}:
            raise WeightVersionError(f"adapters in version {version.id} do not fit actor.lora")
        self._check(version)
        try:
            self._calls.link(self._folder / SHARED, target / SHARED)
        except OSError as error:
            raise explain(error, "link", self._folder / SHARED) from error
        frozen, shared = TensorFile(self._folder / ADAPTED), TensorFile(self._folder / SHARED)
        entries = [
            TensorEntry(name, spec, partial(self._merged, frozen, with_adapters, name))
            for name, spec in frozen.specs.items()
        ]
        write_tensors(target / ADAPTED, entries, METADATA, calls=self._calls)
        places = dict.fromkeys(shared.specs, SHARED) | dict.fromkeys(frozen.specs, ADAPTED)
        size = sum(spec.bytes for file in (shared, frozen) for spec in file.specs.values())
        write_index(target, places, size, self._calls)

    def _check(self, version: CopiedVersion) -> None:
        """Raise UsageError unless the version's adapters belong to the frozen weights."""
        if self._fingerprint is None:
            try:
                self._fingerprint = self._read()
            except UnreadableInputError as error:
                if error.absent:
                    raise
                # The source existed at submission, so this failure may be temporary.
                raise EnvironmentFailure(str(error)) from error
        if self._fingerprint != version.frozen:
            raise UsageError(
                f"{self._source} does not hold the weights that the trainers read from actor.path: "
                f"their fingerprint is {self._fingerprint} here and {version.frozen} in weight "
                f"version {version.id}. The folder was changed, or this host sees a different "
                "folder; no completion was generated with it"
            )

    def _merged(self, frozen: TensorFile, adapters: TensorFile, name: str) -> Array:
        weight, b, a = (
            _tensor(file, of)
            for file, of in (
                (frozen, name),
                (adapters, matrix_name(self._adapted[name], LORA_B)),
                (adapters, matrix_name(self._adapted[name], LORA_A)),
            )
        )
        return as_array(merged_weight(weight, b, a.to(self._device), self._scale))

    def _read(self) -> str:
        """Copy the frozen weights tensor by tensor; return their fingerprint."""
        logger.info("reading the frozen weights in %s", self._source)
        shutil.rmtree(self._folder, ignore_errors=True)
        atomic.make_private_directory(self._folder, calls=self._calls)
        if not isinstance(self._config, ModelConfig):
            return self._read_files(self._config)
        shapes, constants = stored_shapes(self._config, "lm"), constant_specs(self._config)
        types = {n: constants[n].dtype if n in constants else self._dtype for n in shapes}
        fingerprint = Fingerprint(shapes, self._device)
        weights = Weights(self._source, self._config, "lm")

        def read(name: str, box: Box) -> Array:
            values = weights.read(name, box).to(getattr(torch, types[name]))
            fingerprint.add(name, box, values)
            return as_array(values)

        specs = [(name, TensorSpec(shape, types[name])) for name, shape in shapes.items()]
        entries = file_entries(specs, read, storage_of(self._config))
        self._write(SHARED, (one for one in entries if one.name not in self._adapted))
        self._write(ADAPTED, (one for one in entries if one.name in self._adapted))
        return str(fingerprint)

    def _read_files(self, config: HFConfig) -> str:
        """Copy the tensors of a model of transformers as its files store them.

        Round only weights with adapters, to the trainers' dtype. Return the fingerprint.
        """
        files = open_folder(self._source)
        specs = files.specs()
        names = adapted_tensors(self._shapes, specs, self._source, config, "lm")
        self._adapted = {name: weight for weight, name in names.items()}
        whole = {name: tuple(spec.shape) for name, spec in specs.items()}
        fingerprint = Fingerprint(whole, self._device)

        def read(name: str) -> Array:
            box, dtype = Box.whole(whole[name]), specs[name].dtype
            values = as_tensor(np.ascontiguousarray(files.read(name, box)), dtype)
            fingerprint.add(name, box, values)
            if name in self._adapted:
                values = values.to(getattr(torch, self._dtype))
            return as_array(values)

        def entries(names: Iterable[str]) -> Iterator[TensorEntry]:
            for name in names:
                dtype = self._dtype if name in self._adapted else specs[name].dtype
                yield TensorEntry(name, TensorSpec(whole[name], dtype), partial(read, name))

        self._write(SHARED, entries(name for name in specs if name not in self._adapted))
        self._write(ADAPTED, entries(self._adapted))
        return str(fingerprint)

    def _write(self, name: str, entries: Iterable[TensorEntry]) -> None:
        write_tensors(self._folder / name, entries, METADATA, calls=self._calls)


def _tensor(file: TensorFile, name: str) -> Tensor:
    spec = file.specs[name]
    return as_tensor(file.flat(name), spec.dtype).view(spec.shape)
