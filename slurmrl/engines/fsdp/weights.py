"""Construction of a model, the shapes of its parameters, and filling them box by box."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from slurmrl.engines.initial_weights import BoxReader
from slurmrl.errors import UsageError
from slurmrl.models.base import PackedModel
from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.decoder import build
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.parallel.split import Split
from slurmrl.models.shapes import parameter_shapes
from slurmrl.tensors.layout.box import Box, Index
from slurmrl.tensors.layout.layout import TensorSpec


def new_model(
    config: ModelConfig | HFConfig,
    head: Head,
    split: Split,
    *,
    source: Path | None,
    seed: int,
    dtype: str,
) -> PackedModel:
    """Return this rank's part of a built-in decoder on the meta device, or a model of transformers
    with its weights on the CPU."""
    if isinstance(config, ModelConfig):
        with torch.device("meta"):
            return build(config, head, split).to(getattr(torch, dtype))
    from slurmrl.models.hf_model import HFModel  # transformers takes seconds to import

    return HFModel(config, head, source=source, seed=seed, dtype=getattr(torch, dtype))


def whole_shapes(model: PackedModel) -> dict[str, Index]:
    """The whole shape, by name, of every parameter of which this rank has a part."""
    if isinstance(model.config, ModelConfig):
        return parameter_shapes(model.config, model.head)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def constant_specs(model: PackedModel, *, trained: bool) -> dict[str, TensorSpec]:
    """The model's constants, by name. Raises UsageError if a checkpoint of a trained model cannot
    store them."""
    specs = {
        name: TensorSpec(tuple(values.shape), str(values.dtype).removeprefix("torch."))
        for name, values in model.constants().items()
    }
    odd = sorted(name for name, spec in specs.items() if spec.dtype != "float32")
    if trained and odd:
        raise UsageError(
            f"{model.config.model_type} models cannot be trained here: {odd[0]} is "
            f"{specs[odd[0]].dtype}, not float32"
        )
    return specs


@torch.no_grad()
def fill(local: Mapping[str, Tensor], boxes: Mapping[str, Box], read: BoxReader) -> None:
    """Write each parameter's box into its local chunk."""
    for name, target in local.items():
        if boxes[name].count:
            target.copy_(read(name, boxes[name]))
