"""New weights for a model of transformers, read from a folder into its own tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from slurmrl.errors import UsageError
from slurmrl.models.hf import as_tensor
from slurmrl.models.hf_config import stored
from slurmrl.models.hf_model import HFModel
from slurmrl.models.model_tensors import open_folder
from slurmrl.tensors.layout import Box


@torch.no_grad()
def read_weights(model: HFModel, folder: Path) -> None:
    """Fill a model's parameters and constants from a folder in Hugging Face form.

    If the files have other names or stack fewer tensors than the model, transformers converts them,
    with a second copy of the model in memory.

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
        _read_converted(model, folder, min(other))
        return
    for name, target in targets.items():
        spec = specs[name]
        target.copy_(as_tensor(tensors.read(name, Box.whole(spec.shape)), spec.dtype))


def _read_converted(model: HFModel, folder: Path, name: str) -> None:
    """Read files of another form than the model; ``name`` is a tensor that they lack."""
    options = {"dtype": next(model.parameters()).dtype, "output_loading_info": True}
    made: Any = None
    try:
        load: Any = AutoModelForCausalLM.from_pretrained
        made, report = load(folder, **options)
        problem = bool(report["missing_keys"] or report["mismatched_keys"])
    except (ValueError, KeyError, OSError, RuntimeError):
        problem = True
    if problem or made.state_dict().keys() != model.inner.state_dict().keys():
        raise UsageError(f"{folder} holds another model: '{name}' is not in its form")
    model.inner.load_state_dict(made.state_dict())
