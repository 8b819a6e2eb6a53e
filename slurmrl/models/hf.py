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


def read_config(folder: Path) -> ModelConfig:
    """The architecture of a model folder.

    Raises UsageError if the folder is not a model or its family is not supported.
    """
    return ModelConfig.from_hf(read_values(folder))


def read_values(folder: Path) -> dict[str, Any]:
    """The ``config.json`` object of a model folder. Raises UsageError if there is none."""
    if CONFIG_FILE not in inputs.list_names(folder):
        raise inputs.missing(
            folder / CONFIG_FILE,
            f"{folder} is not a Hugging Face model folder: it has no {CONFIG_FILE}",
        )
    return inputs.read_json(folder / CONFIG_FILE)


class Weights:
    """The parameters of a model folder as tensors, by the decoder's names."""

    def __init__(self, folder: Path, config: ModelConfig, head: Head) -> None:
        """Raises UsageError if the files do not match the config (``mismatches``).

        The value head may be missing.
        """
        self._parameters = FolderParameters(folder, config, head)
        if problem := other_projection(folder, config, head):
            raise UsageError(f"{folder}: {problem}")

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a parameter, in the files' dtype.

        A missing value head is zero, so that a new critic's values start at zero.
        """
        if name == VALUE_HEAD and not self._parameters.stored(name):
            return torch.zeros(box.size)
        return as_tensor(self._parameters.read(name, box), self._parameters.dtype(name))

    def read_finite(self, name: str, box: Box) -> Tensor:
        """Read a box like `read`. Raises UsageError if it has NaN or infinite values."""
        values = self.read(name, box)
        if not is_finite(values):
            folder = self._parameters.folder
            problem = not_finite(folder, self._parameters.stored(name))
            raise UsageError(problem or f"{folder} has changed while it was read")
        return values


def is_finite(values: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinite values.

    It computes only the min and max, which takes no memory, and less time than reading a file.
    """
    if not values.numel() or not values.is_floating_point() or values.element_size() == 1:
        return True
    least, greatest = torch.aminmax(values)
    return bool(least >= -LARGEST) and bool(greatest <= LARGEST)  # NaN is neither


def as_array(tensor: Tensor) -> Array:
    """A tensor as an array on the host; bfloat16 as its bits in uint16."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        bits: Array = host.view(torch.int16).numpy().view(np.uint16)
        return bits
    values: Array = host.numpy()
    return values


def as_tensor(values: Array, dtype: str) -> Tensor:
    """An array of `as_array` as a tensor of type ``dtype``, in the same memory.

    The array may be a part of a mapped file. Then nothing may write to the tensor.
    """
    bits = values.view(np.int16) if dtype == "bfloat16" else values
    if not bits.flags.writeable:
        bits = np.asarray(_Unlocked(bits))
    tensor = torch.from_numpy(bits)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


class _Unlocked:
    """The memory of a read-only array, of which torch makes tensors without a warning.

    A mapping that may be written would count as memory of the process on hosts that promise no
    more memory than they have.
    """

    def __init__(self, values: Array) -> None:
        self._values = values
        interface = values.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
