"""Model folders of versions of adapters: the frozen weights, merged with these as trainers do.

A task reads the frozen weights once, from the folder of ``actor.path``, and keeps them in its
host's memory, rounded as trainers keep them. It merges only if their fingerprint is that of the
trainers' frozen weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slurmrl import log
from slurmrl.config.schema import Lora
from slurmrl.engines.fingerprint import Fingerprint
from slurmrl.engines.fsdp.adapters import merged_weight
from slurmrl.errors import (
    EnvironmentFailure,
    UnreadableInputError,
    UsageError,
    WeightVersionError,
)
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.failures import explain
from slurmrl.models.adapters import (
    LORA_A,
    LORA_B,
    adapted_weights,
    matrix_name,
    trained_shapes,
)
from slurmrl.models.config import ModelConfig
from slurmrl.models.headers import INDEX_FILE
from slurmrl.models.hf import Weights, as_array, open_tensors
from slurmrl.models.shapes import parameter_shapes
from slurmrl.models.storage import storage_of
from slurmrl.tensors.checkpoint.export import write_json
from slurmrl.tensors.checkpoint.stored import file_entries
from slurmrl.tensors.checkpoint.tensors import TensorEntry, TensorFile, write_tensors
from slurmrl.tensors.layout.box import Box
from slurmrl.tensors.layout.copy import Array
from slurmrl.tensors.layout.layout import TensorSpec
from slurmrl.tensors.weights.local_copy import CopiedVersion

logger = log.get(__name__)

SHARED = "model-00001-of-00002.safetensors"
"""The weights without adapters: one file, which all versions link."""
ADAPTED = "model-00002-of-00002.safetensors"
"""The weights with adapters: frozen, and merged in the folder of a version."""
METADATA = {"format": "pt"}


class MergingHost:
    """The frozen weights on this host, and the merging."""

    def __init__(
        self,
        source: Path,
        folder: Path,
        config: ModelConfig,
        dtype: str,
        lora: Lora,
        device: torch.device,
        *,
        calls: SystemCalls = REAL,
    ) -> None:
        """``source``: the folder of ``actor.path``; ``folder``: of this task alone, in the host's
        memory or on a local disk; ``dtype``: of frozen and merged weights. Computes on
        ``device``."""
        self._source, self._folder = source, folder
        self._config, self._dtype, self._device = config, dtype, device
        self._scale = lora.scale
        self._adapted = {name for name, _ in adapted_weights(config, lora)}
        self._trained = trained_shapes(config, "lm", lora)
        self._calls = calls
        self._fingerprint: str | None = None
        """Of the frozen weights in the folder; None before they have been read."""

    def write(self, version: CopiedVersion, target: Path) -> None:
        """Add the merged weights of a version of adapters to a folder.

        Raises WeightVersionError if it holds other adapters than the model has; UsageError if the
        source is gone, is another model, or has other weights than the trainers' frozen ones;
        CorruptFileError if it is damaged; EnvironmentFailure.
        """
        with_adapters = version.open()
        found = {name: (spec.shape, spec.dtype) for name, spec in with_adapters.specs.items()}
        if found != {name: (shape, "float32") for name, shape in self._trained.items()}:
            raise WeightVersionError(f"version {version.id} holds other adapters than actor.lora")
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
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        write_json(target / INDEX_FILE, index, self._calls)

    def _check(self, version: CopiedVersion) -> None:
        """Raise UsageError unless the version's adapters belong to the frozen weights."""
        if self._fingerprint is None:
            try:
                self._fingerprint = self._read()
            except UnreadableInputError as error:
                if error.absent:
                    raise
                raise EnvironmentFailure(str(error)) from error  # it was there at submission
        if self._fingerprint != version.frozen:
            raise UsageError(
                f"{self._source} does not hold the weights that the trainers read from actor.path: "
                f"their fingerprint is {self._fingerprint} here and {version.frozen} in weight "
                f"version {version.id}. The folder has changed since, or this host sees another "
                "one; nothing was generated with it"
            )

    def _merged(self, frozen: TensorFile, adapters: TensorFile, name: str) -> Array:
        weight, b, a = (
            _tensor(file, of)
            for file, of in (
                (frozen, name),
                (adapters, matrix_name(name, LORA_B)),
                (adapters, matrix_name(name, LORA_A)),
            )
        )
        return as_array(merged_weight(weight, b, a.to(self._device), self._scale))

    def _read(self) -> str:
        """Copy the frozen weights, tensor by tensor; return their fingerprint."""
        logger.info("reading the frozen weights in %s", self._source)
        shutil.rmtree(self._folder, ignore_errors=True)
        atomic.make_private_directory(self._folder, calls=self._calls)
        shapes = parameter_shapes(self._config, "lm")
        fingerprint = Fingerprint(shapes, self._device)
        with open_tensors(self._source) as files:
            weights = Weights(files, self._config, "lm")

            def read(name: str, box: Box) -> Array:
                values = weights.read(name, box).to(getattr(torch, self._dtype))
                fingerprint.add(name, box, values)
                return as_array(values)

            specs = [(name, TensorSpec(shape, self._dtype)) for name, shape in shapes.items()]
            entries = file_entries(specs, read, storage_of(self._config))
            self._write(SHARED, (one for one in entries if one.name not in self._adapted))
            self._write(ADAPTED, (one for one in entries if one.name in self._adapted))
        return str(fingerprint)

    def _write(self, name: str, entries: Iterable[TensorEntry]) -> None:
        write_tensors(self._folder / name, entries, METADATA, calls=self._calls)


def _tensor(file: TensorFile, name: str) -> Tensor:
    spec = file.specs[name]
    bits = torch.from_numpy(file.flat(name).view(np.uint8).copy())  # (torch wants no read-only one)
    return bits.view(getattr(torch, spec.dtype)).view(spec.shape)
