"""The first values of a model's parameters, box by box; never a whole model in memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from slurmrl.config.schema.model import Model
from slurmrl.errors import UsageError
from slurmrl.layout.box import Box, Index
from slurmrl.models.config import ModelConfig
from slurmrl.models.hf import TensorSource, read_config
from slurmrl.models.init import init_tensor
from slurmrl.models.shapes import VALUE_HEAD


def model_config(role: str, model: Model, source: Path | None) -> ModelConfig:
    """The architecture of the source folder, else the one in the run's config."""
    if source is not None:
        return read_config(source)
    if model.architecture is None:
        raise UsageError(f"{role}: neither weights to start from nor an architecture are given")
    return ModelConfig.from_hf(model.architecture)


@torch.no_grad()
def fill(
    local: Mapping[str, Tensor],
    boxes: Mapping[str, Box],
    shapes: Mapping[str, Index],
    config: ModelConfig,
    *,
    seed: int,
    source: Path | None,
) -> None:
    """Write each parameter's box into its local chunk: from the folder ``source``, else random
    values that depend on (seed, name) only.

    A value head that the source does not have is zero, so that values start at zero.
    """
    with TensorSource(source) if source is not None else nullcontext() as tensors:
        for name, target in local.items():
            box = boxes[name]
            if not box.count:
                continue
            if name == VALUE_HEAD and (tensors is None or name not in tensors):
                target.zero_()
            elif tensors is None:
                target.copy_(init_tensor(name, shapes[name], config, seed)[box.slices])
            else:
                _check_shape(tensors, name, shapes[name], source)
                target.copy_(tensors.read(name, box.start, box.size))


def _check_shape(tensors: TensorSource, name: str, shape: Index, source: Path | None) -> None:
    found = tensors.shape(name)
    if found != shape:
        raise UsageError(f"{source}: '{name}' has shape {found}, its config.json implies {shape}")
