"""Files whose vocabulary projection contradicts their config.json. Torch-free."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.folder_tensors import open_folder
from slurmrl.models.headers import stored_name
from slurmrl.models.shapes import EMBEDDING, LM_HEAD
from slurmrl.models.storage import storage_of
from slurmrl.tensors.checkpoint.precision import BLOCK, widened
from slurmrl.tensors.layout.box import Box, blocks


def other_projection(folder: Path, config: ModelConfig, head: Head) -> str | None:
    """Why a tied model cannot be loaded: its files have a projection that is not the embedding.
    transformers uses that projection, in spite of config.json. Raises UsageError,
    CheckpointError, CorruptFileError."""
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
