"""The tensors of a model folder: those of its safetensors files, or of a pinned checkpoint.
Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from slurmrl.models.headers import weight_files
from slurmrl.tensors.checkpoint.pinned import is_pinned
from slurmrl.tensors.checkpoint.tensors import TensorFile
from slurmrl.tensors.layout.box import Box
from slurmrl.tensors.layout.copy import Array
from slurmrl.tensors.layout.layout import TensorSpec


class FolderTensors(Protocol):
    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors by their names in the files."""
        ...

    def read(self, name: str, box: Box) -> Array:
        """A box of a tensor, contiguous; bfloat16 as its bits (uint16)."""
        ...

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor, or the folder if several files hold parts of it."""
        ...


def open_folder(folder: Path) -> FolderTensors:
    """Raises UsageError, CheckpointError or CorruptFileError if the folder has no readable
    weights."""
    if is_pinned(folder):
        from slurmrl.models.pinned import PinnedTensors  # it merges adapters, as others do here

        return PinnedTensors(folder)
    return SafetensorsFolder(folder)


class SafetensorsFolder:
    """The tensors of a folder with one safetensors file, or with several and an index."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, TensorFile] = {}
        for file, listed in weight_files(folder).items():
            opened = TensorFile(folder / file)
            self._files |= dict.fromkeys(listed or opened.specs, opened)

    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: file.specs[name] for name, file in self._files.items()}

    def read(self, name: str, box: Box) -> Array:
        file = self._files[name]
        values = file.flat(name).reshape(file.specs[name].shape)[box.slices].copy()
        file.release()
        return np.asarray(values, order="C")

    def file(self, name: str) -> Path:
        return self._files[name].path
