"""Boxes in storages of this process: numpy arrays or memory maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from slurmrl.errors import LayoutError
from slurmrl.tensors.layout.box import Index

Array = npt.NDArray[Any]


def view(flat: Array, offset: int, strides: Index, size: Index) -> Array:
    """The strided box of a flat array, without a copy. Raises LayoutError if it exceeds the
    array."""
    span = sum((length - 1) * stride for length, stride in zip(size, strides, strict=True))
    if offset < 0 or any(s < 0 for s in strides) or offset + span >= flat.size:
        raise LayoutError(f"a box of size {size} at {offset} exceeds a storage of {flat.size}")
    return np.lib.stride_tricks.as_strided(
        flat[offset:], shape=size, strides=tuple(s * flat.itemsize for s in strides)
    )
