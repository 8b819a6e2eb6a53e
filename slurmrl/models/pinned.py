"""The weights of a pinned checkpoint, as the tensors of the model files that an export would have.
Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from slurmrl.config.schema.model import Lora
from slurmrl.errors import UsageError
from slurmrl.fsio import inputs
from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.hf_config import stored
from slurmrl.models.merged import MergedCheckpoint
from slurmrl.models.storage import storage_of
from slurmrl.tensors.checkpoint.export import ExportedWeights
from slurmrl.tensors.checkpoint.pinned import PinnedOrigin, read_origin
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from slurmrl.tensors.checkpoint.stored import Storage, file_tensors
from slurmrl.tensors.checkpoint.tensors import NUMPY_DTYPES
from slurmrl.tensors.layout.box import Box
from slurmrl.tensors.layout.copy import Array
from slurmrl.tensors.layout.layout import TensorSpec


class PinnedTensors:
    """Reads boxes of them. Raises CheckpointError or CorruptFileError for files that do not belong
    together, UsageError if the model that adapters belong to is gone."""

    def __init__(self, folder: Path) -> None:
        origin = read_origin(folder)
        values = inputs.read_json(folder / "config.json")
        self._dtype = origin.dtype
        self._trained = RoleCheckpoint(folder, origin.role)
        self._weights, storage = _opened(self._trained, origin, values)
        self._tensors = file_tensors(self._weights.weights(), storage)

    def specs(self) -> dict[str, TensorSpec]:
        """The tensors by name."""
        return {name: tensor.spec for name, tensor in self._tensors.items()}

    def check_base(self) -> None:
        """Compare the model that adapters belong to with the one that they were trained on, as an
        export does; reads all of its weights. Raises UsageError for another one."""
        frozen, weights = self._trained.frozen, self._weights
        if isinstance(weights, MergedCheckpoint) and frozen and self._dtype:
            weights.check_base(frozen, self._dtype)

    def read(self, name: str, box: Box) -> Array:
        """A box of a tensor, contiguous; bfloat16 as its bits (uint16)."""
        tensor = self._tensors[name]
        target = np.empty(box.size, NUMPY_DTYPES[tensor.spec.dtype])
        for parameter, spec, part in tensor.shards:
            common = part.box(part.of(spec.shape)).intersect(box)
            if common is None:
                continue
            values = self._weights.read(parameter, part.parameter(common))
            values = values if part.row is None else values[0]
            place: tuple[Any, ...] = (*common.inside(box), ...)  # (a view of a scalar, too)
            target[place] = values.T if part.transposed else values
        return target

    def file(self, name: str) -> Path:
        """Return the folder: each rank's file holds a part of the tensor."""
        return self._trained.directory


def _opened(
    trained: RoleCheckpoint, origin: PinnedOrigin, values: dict[str, Any]
) -> tuple[ExportedWeights, Storage]:
    if origin.implementation == "hf":
        return trained, stored
    config = ModelConfig.from_hf(values)
    if origin.lora is None:
        return trained, storage_of(config)
    if origin.base is None or not Path(origin.base).is_dir():
        raise UsageError(
            f"the adapters of {origin.trial} belong to the model {origin.base}, which is not there"
        )
    head: Head = "value" if origin.head == "value" else "lm"
    lora = Lora.model_validate(dict(origin.lora))
    merged = MergedCheckpoint(trained, Path(origin.base), config, head, lora)
    return merged, storage_of(config)
