"""Execution of copies between storages of this process: numpy arrays or memory maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmrl.errors import LayoutError
from slurmrl.layout.box import Index
from slurmrl.layout.plan import Copy, Site

Array = npt.NDArray[Any]
Storages = Callable[[int, str], Array]
"""(rank, storage name) -> that storage as a flat array."""


def view(flat: Array, offset: int, strides: Index, size: Index) -> Array:
    """The strided box of a flat array, without a copy. Raises LayoutError if it exceeds the
    array."""
    span = sum((length - 1) * stride for length, stride in zip(size, strides, strict=True))
    if offset < 0 or any(s < 0 for s in strides) or offset + span >= flat.size:
        raise LayoutError(f"a box of size {size} at {offset} exceeds a storage of {flat.size}")
    return np.lib.stride_tricks.as_strided(
        flat[offset:], shape=size, strides=tuple(s * flat.itemsize for s in strides)
    )


def execute(copies: Iterable[Copy], sources: Storages, targets: Storages) -> None:
    """Move the bytes. Source and target of a copy have elements of one size."""
    for copy in copies:
        read = _view_of(copy.source, copy.box.size, sources)
        write = _view_of(copy.target, copy.box.size, targets)
        if read.itemsize != write.itemsize:
            raise LayoutError(
                f"tensor '{copy.name}' has elements of {read.itemsize} bytes in the source and "
                f"{write.itemsize} in the target"
            )
        write[...] = read.view(write.dtype)


def _view_of(site: Site, size: Index, storages: Storages) -> Array:
    return view(storages(site.rank, site.storage), site.offset, site.strides, size)
