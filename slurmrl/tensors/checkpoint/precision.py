"""Conversion of an export's tensors to other floating-point types. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from slurmrl.errors import CheckpointError
from slurmrl.tensors.checkpoint.tensors import NUMPY_DTYPES, TensorEntry
from slurmrl.tensors.layout.copy import Array
from slurmrl.tensors.layout.layout import TensorSpec

FLOATS: Final = ("float32", "bfloat16", "float16")
BLOCK: Final = 2**22
"""Elements converted at a time, which bounds the size of intermediate results."""
BF16_NAN: Final = 0x7FC0


@dataclass(frozen=True)
class Precision:
    """The type of each floating-point tensor in an export; other tensors keep theirs."""

    default: str | None = None
    """For tensors that are not in ``tensors``; None keeps the checkpoint's type."""
    tensors: Mapping[str, str] = field(default_factory=dict)

    def apply(self, entry: TensorEntry) -> TensorEntry:
        """Convert an entry to its type. Its ``data`` raises CheckpointError for a finite value that
        overflows in that type."""
        stored = entry.spec.dtype
        bare = entry.name.partition(".")[2]  # its name in files saved without a head
        wanted = self.tensors.get(entry.name) or self.tensors.get(bare) or self.default
        if wanted is None or wanted == stored or stored not in FLOATS:
            return entry
        spec = TensorSpec(entry.spec.shape, wanted)
        return TensorEntry(entry.name, spec, partial(_converted, entry, wanted))


AS_STORED: Final = Precision()


def _converted(entry: TensorEntry, wanted: str) -> Array:
    values = entry.data()
    flat = values.reshape(-1)
    target = np.empty(flat.shape, dtype=NUMPY_DTYPES[wanted])
    for begin in range(0, flat.size, BLOCK):
        block = slice(begin, begin + BLOCK)
        wide = widened(flat[block], entry.spec.dtype)
        target[block] = narrow = narrowed(wide, wanted)
        lost = np.isinf(widened(narrow, wanted)) & np.isfinite(wide)
        if lost.any():
            value = float(wide[lost][0])
            raise CheckpointError(
                f"'{entry.name}' has the value {value:g}, which overflows in {wanted}: choose "
                "another type"
            )
    return target.reshape(values.shape)


def widened(values: Array, dtype: str) -> Array:
    """Convert to float32, without rounding."""
    if dtype == "bfloat16":
        return (values.astype("<u4") << 16).view("<f4")
    return values.astype("<f4", copy=False)


def narrowed(wide: Array, dtype: str) -> Array:
    """Round to nearest, ties to even, like torch."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return np.asarray(wide, dtype=NUMPY_DTYPES[dtype])
    bits = wide.view("<u4")
    rounded: Array = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    rounded[np.isnan(wide)] = BF16_NAN
    return rounded
