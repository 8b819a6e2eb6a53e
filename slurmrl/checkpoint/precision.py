"""Other floating-point types for the tensors of an export. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from slurmrl.checkpoint.tensors import NUMPY_DTYPES, TensorEntry
from slurmrl.errors import CheckpointError
from slurmrl.layout.copy import Array
from slurmrl.layout.layout import TensorSpec

FLOATS: Final = ("float32", "bfloat16", "float16")
BLOCK: Final = 2**22
"""Elements that are converted at a time, so that intermediate results stay small."""
BF16_NAN: Final = 0x7FC0


@dataclass(frozen=True)
class Precision:
    """The floating-point type that each tensor of an export gets; others keep theirs."""

    default: str | None = None
    """For tensors that are not in ``tensors``; None keeps the checkpoint's type."""
    tensors: Mapping[str, str] = field(default_factory=dict)

    def apply(self, entry: TensorEntry) -> TensorEntry:
        """The entry in its type. Its ``data`` raises CheckpointError for a value that is finite in
        the checkpoint and not in that type."""
        stored = entry.spec.dtype
        bare = entry.name.partition(".")[2]  # its name in files that were saved without a head
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
        wide = _widened(flat[block], entry.spec.dtype)
        target[block] = narrow = _narrowed(wide, wanted)
        lost = np.isinf(_widened(narrow, wanted)) & np.isfinite(wide)
        if lost.any():
            value = float(wide[lost][0])
            raise CheckpointError(
                f"'{entry.name}' holds {value:g}, which {wanted} does not: choose another type"
            )
    return target.reshape(values.shape)


def _widened(values: Array, dtype: str) -> Array:
    """As float32, exactly."""
    if dtype == "bfloat16":
        return (values.astype("<u4") << 16).view("<f4")
    return values.astype("<f4", copy=False)


def _narrowed(wide: Array, dtype: str) -> Array:
    """Rounded to the nearest, ties to even, as torch does it."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return np.asarray(wide, dtype=NUMPY_DTYPES[dtype])
    bits = wide.view("<u4")
    rounded: Array = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    rounded[np.isnan(wide)] = BF16_NAN
    return rounded
