"""Weights of a model folder that are not finite numbers. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.folder_tensors import open_folder
from slurmrl.models.headers import implied_shapes, stored_name
from slurmrl.tensors.checkpoint.precision import BLOCK, widened
from slurmrl.tensors.layout.box import Box, blocks

LARGEST: Final = 3.3895313892515355e38
"""The largest number of bfloat16: a larger weight becomes infinite there."""
SMALL_BYTES: Final = 64 * 2**20
"""Bytes of a folder that are read before a submission."""


def not_finite(folder: Path, names: Iterable[str]) -> str | None:
    """Describe the first of these tensors of a folder that has NaN or infinite values. Return None
    if there is none. Raises UsageError, CheckpointError, CorruptFileError."""
    tensors = open_folder(folder)
    specs = tensors.specs()
    for name in names:
        spec = specs[name]
        nans = infinite = 0
        for box in blocks(Box.whole(spec.shape), BLOCK):
            with np.errstate(over="ignore"):
                values = widened(tensors.read(name, box), spec.dtype)
            nans += int(np.isnan(values).sum())
            infinite += int((np.abs(values) > LARGEST).sum())
        if nans or infinite:
            size = Box.whole(spec.shape).count
            return (
                f"{tensors.file(name)}: tensor '{name}' has {nans} NaN and {infinite} infinite "
                f"values of {size}, and weights must be finite numbers. Either the training that "
                "wrote them diverged, or the file is damaged: use other weights, or copy it again"
            )
    return None


def small_not_finite(
    folder: Path, config: ModelConfig, head: Head, limit: int = SMALL_BYTES
) -> str | None:
    """Like `not_finite` for the smallest tensors that a model uses, up to ``limit`` bytes in all.
    After a training that diverged, these have NaN too. They are all tensors of a small model."""
    specs = open_folder(folder).specs()
    stored = (stored_name(name, specs) for name in implied_shapes(config, head))
    used = {name for name in stored if name is not None}
    small = []
    for name in sorted(used, key=lambda name: (specs[name].bytes, name)):
        limit -= specs[name].bytes
        if limit < 0:
            break
        small.append(name)
    return not_finite(folder, small)
