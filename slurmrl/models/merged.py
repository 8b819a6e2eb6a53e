"""The weights of a role that trains adapters: those of its model folder, with the adapters merged.
Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from slurmrl.config.schema.model import Lora
from slurmrl.errors import UsageError
from slurmrl.fsio import inputs
from slurmrl.models.adapters import LORA_A, LORA_B, adapted_weights, matrix_name
from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.fingerprint import shown, summand
from slurmrl.models.folder_tensors import open_folder
from slurmrl.models.headers import mismatches, read_headers, stored_name
from slurmrl.models.merging import merge
from slurmrl.models.shapes import parameter_shapes
from slurmrl.models.storage import storage_of
from slurmrl.tensors.checkpoint.precision import narrowed, widened
from slurmrl.tensors.checkpoint.stored import TensorSlice
from slurmrl.tensors.layout.box import Box, blocks
from slurmrl.tensors.layout.copy import Array
from slurmrl.tensors.layout.layout import TensorSpec

BLOCK = 2**16
"""Elements of which bits are weighed at a time, in the cache of a processor's core."""


class TrainedTensors(Protocol):
    """What is trained, of a checkpoint or of a weight version."""

    def weights(self) -> Iterable[tuple[str, TensorSpec]]:
        """Names and specs of the tensors."""
        ...

    def read(self, name: str, box: Box) -> Array:
        """A box of a tensor."""
        ...


class MergedCheckpoint:
    """Weights for an export: W + scale * B A in float32, and what is trained besides. Raises
    UsageError if the folder has no weights of this architecture."""

    def __init__(
        self, trained: TrainedTensors, folder: Path, config: ModelConfig, head: Head, lora: Lora
    ) -> None:
        inputs.check_folder(folder)
        self._folder = folder
        headers, problems = read_headers(folder)
        problems = problems or mismatches(headers, config, head)
        if problems:
            raise UsageError(f"{folder}: {'; '.join(problems)}")
        self._trained, self._scale = trained, lora.scale
        self._trained_specs = dict(trained.weights())
        self._shapes = parameter_shapes(config, head)
        self._storage = storage_of(config)
        self._adapted = {name for name, _ in adapted_weights(config, lora)}
        self._frozen = open_folder(folder)
        self._frozen_specs = self._frozen.specs()

    def weights(self) -> Iterator[tuple[str, TensorSpec]]:
        """Names and specs of all parameters, in the model's order."""
        return ((name, TensorSpec(shape, "float32")) for name, shape in self._shapes.items())

    def read(self, name: str, box: Box) -> Array:
        """A box of a parameter, merged, in float32. Raises CheckpointError, UsageError."""
        if name in self._trained_specs:
            return self._trained.read(name, box)
        values = self._base(name, box)
        if name not in self._adapted:
            return values
        rows, columns = zip(box.start, box.size, strict=True)
        rank = self._trained_specs[matrix_name(name, LORA_A)].shape[0]
        a = self._trained.read(matrix_name(name, LORA_A), Box((0, columns[0]), (rank, columns[1])))
        b = self._trained.read(matrix_name(name, LORA_B), Box((rows[0], 0), (rows[1], rank)))
        merged = np.empty(box.size, "<f4")
        merge(merged, values, b, a, self._scale)
        return merged

    def check_base(self, fingerprint: str, dtype: str) -> None:
        """Compare the folder's weights with those for which the adapters were trained: rounded to
        ``dtype`` they have this fingerprint. Raises UsageError for others."""
        found = self._fingerprint(dtype)
        if found != fingerprint:
            raise UsageError(
                f"{self._folder} holds other weights than when the adapters were trained: their "
                f"fingerprint is {found} now and was {fingerprint}. Put the folder back as it was"
            )

    def _fingerprint(self, dtype: str) -> str:
        total = 0
        for name, shape in self._shapes.items():
            if name in self._trained_specs:
                continue
            for box in blocks(Box.whole(shape), BLOCK):
                values = narrowed(self._base(name, box), dtype).reshape(-1)
                bits = values.view(f"i{values.itemsize}")
                total += int(summand(name, shape, box, bits, np.arange))
        return shown(total)

    def _base(self, name: str, box: Box) -> Array:
        """A box of a parameter of the folder, in float32."""
        parts = self._storage(name, self._shapes[name])
        if parts[0].row is None:
            return self._part(parts[0], box)
        rows = parts[box.start[0] : box.stop[0]]
        return np.stack([self._part(part, box) for part in rows])

    def _part(self, part: TensorSlice, box: Box) -> Array:
        stored = stored_name(part.tensor, self._frozen_specs)
        assert stored is not None, "the files were compared with the architecture"
        values = self._frozen.read(stored, part.box(box))
        wide = np.ascontiguousarray(widened(values, self._frozen_specs[stored].dtype))
        return np.ascontiguousarray(wide.T) if part.transposed else wide
