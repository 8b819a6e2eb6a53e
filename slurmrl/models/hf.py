"""Hugging Face model folders, whose weights are read box by box.

Files are memory-mapped, and only the bytes of a box are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slurmrl.errors import UsageError
from slurmrl.fsio import inputs
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.model_tensors import LARGEST, FolderParameters, not_finite, other_projection
from slurmrl.models.shapes import VALUE_HEAD
from slurmrl.tensors.layout import Array, Box

CONFIG_FILE = "config.json"


def read_values(folder: Path) -> dict[str, Any]:
    """Return the ``config.json`` object of a model folder. Raises UsageError if there is none."""
    if CONFIG_FILE not in inputs.list_names(folder):
        raise inputs.missing(
            folder / CONFIG_FILE,
            f"{folder} is not a Hugging Face model folder: it has no {CONFIG_FILE}",
        )
    return inputs.read_json(folder / CONFIG_FILE)


class Weights:
    """The parameters of a model folder as tensors, under the decoder's names."""

    def __init__(self, folder: Path, config: ModelConfig, head: Head) -> None:
        """Open the files, which may lack the value head. Raises UsageError for a mismatch."""
        self._parameters = FolderParameters(folder, config, head)
        if problem := other_projection(folder, config, head):
            raise UsageError(f"{folder}: {problem}")

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a parameter, in the files' dtype.

        A missing value head is zero, so that a new critic's values start at zero.
        """
        if name == VALUE_HEAD and not self._parameters.stored(name):
            return torch.zeros(box.size)
        return as_tensor(self._parameters.read(name, box), self._parameters.dtype(name))

    def read_finite(self, name: str, box: Box) -> Tensor:
        """Return a box as `read` does. Raises UsageError if the box has NaN or infinite values."""
        values = self.read(name, box)
        if not is_finite(values):
            folder = self._parameters.folder
            problem = not_finite(folder, self._parameters.stored(name))
            raise UsageError(problem or f"{folder} has changed during reading; start again")
        return values


def is_finite(values: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinite values.

    Only the minimum and maximum are computed, which needs no memory and less time than reading.
    """
    if not values.numel() or not values.is_floating_point() or values.element_size() == 1:
        return True
    least, greatest = torch.aminmax(values)
    return bool(least >= -LARGEST) and bool(greatest <= LARGEST)  # false for NaN


def as_array(tensor: Tensor) -> Array:
    """Return a tensor as an array in host memory; bfloat16 as its bits in uint16."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        bits: Array = host.view(torch.int16).numpy().view(np.uint16)
        return bits
    values: Array = host.numpy()
    return values


def as_tensor(values: Array, dtype: str) -> Tensor:
    """Return an array of `as_array` as a tensor of type ``dtype``, in the same memory.

    If the array is a part of a mapped file, nothing may write to the tensor.
    """
    bits = values.view(np.int16) if dtype == "bfloat16" else values
    if not bits.flags.writeable:
        bits = np.asarray(_Unlocked(bits))
    tensor = torch.from_numpy(bits)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


class _Unlocked:
    """The memory of a read-only array, from which torch makes a tensor without a warning.

    (A writable mapping would count as memory of the process on hosts without overcommit.)
    """

    def __init__(self, values: Array) -> None:
        self._values = values
        interface = values.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
