"""The interfaces of tensors in a model folder, and of trained tensors. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from slurmrl.tensors.layout import Array, Box, TensorSpec


class FolderTensors(Protocol):
    """The tensors of a model folder."""

    folder: Path

    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors by their names in the files."""
        ...

    def read(self, name: str, box: Box) -> Array:
        """A box of a tensor; bfloat16 as its bits (uint16)."""
        ...

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor, or the folder if several files hold parts of it."""
        ...


class TrainedTensors(Protocol):
    """Trained tensors of a checkpoint or of a weight version."""

    def weights(self) -> Iterable[tuple[str, TensorSpec]]:
        """Names and specs of the tensors."""
        ...

    def read(self, name: str, box: Box) -> Array:
        """A box of a tensor."""
        ...
