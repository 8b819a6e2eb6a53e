"""New weights for a model of transformers, read from a folder into its own tensors."""

from __future__ import annotations

from pathlib import Path

import torch

from slurmrl.errors import UsageError
from slurmrl.models.hf import as_tensor
from slurmrl.models.hf_config import stored
from slurmrl.models.hf_model import HFModel
from slurmrl.models.model_tensors import open_folder
from slurmrl.tensors.layout import Box


@torch.no_grad()
def read_weights(model: HFModel, folder: Path) -> None:
    """Fill a model's parameters and constants from a folder in Hugging Face form.

    Raises UsageError, and changes nothing, if the folder holds another architecture.
    """
    tensors = open_folder(folder)
    specs = tensors.specs()
    targets = {
        stored(name, tuple(each.shape))[0].tensor: each
        for name, each in (*model.named_parameters(), *model.constants().items())
    }
    other = {
        name
        for name, target in targets.items()
        if name not in specs or specs[name].shape != tuple(target.shape)
    }
    if other:
        raise UsageError(f"{folder} holds another model: '{min(other)}' is not in its form")
    for name, target in targets.items():
        spec = specs[name]
        target.copy_(as_tensor(tensors.read(name, Box.whole(spec.shape)), spec.dtype))
