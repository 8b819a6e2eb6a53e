"""Checks of the values in a model folder. Torch-free.

They find weights that are not finite numbers, and files whose vocabulary projection contradicts
their config.json.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.model_tensors import implied_shapes, open_folder, stored_name
from slurmrl.models.shapes import EMBEDDING, LM_HEAD, storage_of
from slurmrl.tensors.checkpoint.export import BLOCK, widened
from slurmrl.tensors.layout import Box, blocks

LARGEST: Final = 3.3895313892515355e38
"""The largest number of bfloat16: a larger weight becomes infinite there."""
SMALL_BYTES: Final = 64 * 2**20
"""Bytes of a folder that are read before a submission."""


def not_finite(folder: Path, names: Iterable[str]) -> str | None:
    """Describe the first of these tensors of a folder that has NaN or infinite values.

    Return None if there is none. Raises UsageError, CheckpointError, CorruptFileError.
    """
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

    After a training that diverged, these have NaN too. They are all tensors of a small model.
    """
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


def other_projection(folder: Path, config: ModelConfig, head: Head) -> str | None:
    """Return why a tied model cannot be loaded; None if it can.

    It cannot if its files have a projection that is not the embedding: transformers uses that
    projection, in spite of config.json. Raises UsageError, CheckpointError, CorruptFileError.
    """
    if head != "lm" or not config.tie_embeddings:
        return None
    tensors = open_folder(folder)
    specs = tensors.specs()
    shape = (config.vocab_size, config.hidden_size)
    (embedding,) = storage_of(config)(EMBEDDING, shape)
    name = stored_name(embedding.tensor, specs)
    if LM_HEAD not in specs or name is None:
        return None
    if specs[LM_HEAD].shape == shape:
        for box in blocks(Box.whole(shape), BLOCK):
            own, other = (
                widened(tensors.read(each, box), specs[each].dtype) for each in (LM_HEAD, name)
            )
            if not np.array_equal(own, other, equal_nan=True):
                break
        else:
            return None
    return (
        f"config.json ties the embeddings (tie_word_embeddings), but {LM_HEAD} of the files is not "
        f"{name}: set tie_word_embeddings to false in config.json, or remove {LM_HEAD}"
    )
