"""Reading new weights from a folder into the tensors of a model of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from slurmrl.errors import UsageError
from slurmrl.models.hf import as_tensor
from slurmrl.models.hf_config import MODULE, HFConfig
from slurmrl.models.hf_files import file_form
from slurmrl.models.hf_loading import task_of
from slurmrl.models.hf_model import HFModel
from slurmrl.models.model_tensors import open_folder
from slurmrl.tensors.checkpoint.tensors import file_tensors
from slurmrl.tensors.layout import Box, TensorSpec


@torch.no_grad()
def read_weights(model: HFModel, folder: Path) -> None:
    """Read a model's parameters and constants from a folder in Hugging Face format.

    A tensor rank reads its parts. If names or shapes in the files differ from the model,
    transformers converts the files, which needs memory for a second copy of the model.

    Raises UsageError, and changes nothing, if the folder has a different architecture.
    """
    assert isinstance(model.config, HFConfig), "a model of transformers"
    tensors = open_folder(folder)
    specs = tensors.specs()
    targets = dict(model.named_parameters()) | model.constants()
    shapes = {name: tuple(each.shape) for name, each in targets.items()}
    boxes = {name: Box.whole(shape) for name, shape in shapes.items()}
    if model.tensor is not None:
        shapes |= model.tensor.whole
        boxes = {n: model.tensor.box(n, s, model.tensor_rank) for n, s in shapes.items()}
    stored = [(name, TensorSpec(shape, "")) for name, shape in shapes.items()]
    files = file_tensors(stored, file_form(model.config, model.head).storage)
    other = {
        name
        for name, file in files.items()
        if name not in specs or specs[name].shape != file.spec.shape
    }
    if other:
        _read_converted(model, folder, min(other), boxes)
        return
    for tensor, file in files.items():
        for name, spec, place in file.shards:
            box = place.of(spec.shape).intersect(boxes[name])
            if box is not None:
                values = place.restored(tensors.read(tensor, place.box(box)))
                part = targets[name][box.inside(boxes[name])]
                part.copy_(as_tensor(values, specs[tensor].dtype))


def _read_converted(model: HFModel, folder: Path, name: str, boxes: Mapping[str, Box]) -> None:
    """Read files that transformers must convert, because they lack tensor ``name``.

    ``boxes`` are the parts of parameters and constants that the model has.
    """
    options = {"dtype": next(model.parameters()).dtype, "output_loading_info": True}
    made: Any = None
    try:
        load = task_of(cast(HFConfig, model.config), "lm").from_pretrained
        made, report = load(folder, **options)
        problem = bool(report["missing_keys"] or report["mismatched_keys"])
    except (ValueError, KeyError, OSError, RuntimeError):
        problem = True
    if problem or made.state_dict().keys() != model.inner.state_dict().keys():
        raise UsageError(f"{folder} contains another model: it lacks tensor '{name}'")
    read = {MODULE + own: values for own, values in made.state_dict().items()}
    parts = {name.removeprefix(MODULE): read[name][box.slices] for name, box in boxes.items()}
    model.inner.load_state_dict(parts, strict=False)  # ``parts`` has tied weights only once.
