"""The weights of a model of transformers, merged with the adapters of a checkpoint. Torch-free.

The result has the tensors of the model's folder, with the names of its files. A weight with an
adapter becomes W + scale * B A. The fingerprint covers the bits in the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np

from slurmrl.fsio import inputs
from slurmrl.models.adapters import (
    LORA_A,
    LORA_B,
    adapted_weight,
    check_unchanged,
    matrix_name,
    merge,
    shown,
    tensor_sum,
)
from slurmrl.models.architecture import Head
from slurmrl.models.hf_config import MODULE, HFConfig
from slurmrl.models.hf_targets import adapted_tensors
from slurmrl.models.shapes import LM_HEAD, FolderTensors, TrainedTensors
from slurmrl.tensors.checkpoint.export import widened
from slurmrl.tensors.layout import Array, Box, TensorSpec

NARROW: Final = ("bfloat16", "float16")
"""Types that are read as float32."""


class MergedFolder:
    """Weights for an export: W + scale * B A in float32, and the folder's other tensors."""

    def __init__(
        self,
        trained: TrainedTensors,
        folder: FolderTensors,
        config: HFConfig,
        head: Head,
        scale: float,
    ) -> None:
        """Open the folder. Raises UsageError if its files do not store the adapted weights."""
        inputs.check_folder(folder.folder)
        self._trained, self._folder, self._scale = trained, folder, scale
        self._specs = folder.specs()
        own = dict(trained.weights())
        self._rank = {name: spec.shape[0] for name, spec in own.items() if name.endswith(LORA_A)}
        self._heads = {n: spec for n, spec in own.items() if adapted_weight(n) is None}
        shapes = {
            weight: (own[matrix_name(weight, LORA_B)].shape[0], own[name].shape[1])
            for name in own
            if name.endswith(LORA_A) and (weight := adapted_weight(name)) is not None
        }
        names = adapted_tensors(shapes, self._specs, folder.folder, config, head)
        self._adapted = {name: weight for weight, name in names.items()}
        """Mapping from the name of an adapted weight in the files to the model's name."""
        replaced = {name.removeprefix(MODULE) for name in self._heads}
        if head == "value":
            replaced.add(LM_HEAD)
        self._kept = [name for name in self._specs if name not in replaced]

    def weights(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield names and specs of all tensors. Narrow types are read as float32."""
        for name in self._kept:
            spec = self._specs[name]
            narrow = spec.dtype in NARROW or name in self._adapted
            yield name, TensorSpec(spec.shape, "float32") if narrow else spec
        yield from self._heads.items()

    def read(self, name: str, box: Box) -> Array:
        """Return a box of a tensor, merged. Raises CheckpointError, UsageError."""
        if name in self._heads:
            return self._trained.read(name, box)
        values, dtype = self._folder.read(name, box), self._specs[name].dtype
        weight = self._adapted.get(name)
        if weight is None and dtype not in NARROW:
            return np.ascontiguousarray(values)
        values = np.ascontiguousarray(widened(values, dtype))
        if weight is None:
            return values
        (first, begin), (rows, columns) = box.start, box.size
        a, b = matrix_name(weight, LORA_A), matrix_name(weight, LORA_B)
        inner = self._trained.read(a, Box((0, begin), (self._rank[a], columns)))
        outer = self._trained.read(b, Box((first, 0), (rows, self._rank[a])))
        merged = np.empty(box.size, "<f4")
        merge(merged, values, outer, inner, self._scale)
        return merged

    def check_base(self, fingerprint: str, _dtype: str) -> None:
        """Raise UsageError if the folder has changed since the adapters were trained.

        The fingerprint covers the files and does not depend on the dtype of training.
        """
        check_unchanged(self._folder.folder, fingerprint, file_fingerprint(self._folder))


def file_fingerprint(folder: FolderTensors) -> str:
    """Return the fingerprint of the tensors in a folder's files."""
    specs = folder.specs().items()
    return shown(sum(tensor_sum(n, spec.shape, partial(folder.read, n)) for n, spec in specs))
