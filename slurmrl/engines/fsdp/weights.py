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
from slurmrl.models.base import PackedModel
from slurmrl.models.build import build
from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.hf import TensorSource, Weights, read_values
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.init import init_tensor
from slurmrl.models.parallel.split import Split
from slurmrl.models.shapes import VALUE_HEAD, parameter_shapes


def model_config(role: str, model: Model, source: Path | None) -> ModelConfig | HFConfig:
    """The architecture of the source folder, else the one in the run's config."""
    kind = HFConfig if model.implementation == "hf" else ModelConfig
    if source is not None:
        return kind.from_hf(read_values(source))
    if model.architecture is None:
        raise UsageError(f"{role}: neither weights to start from nor an architecture are given")
    return kind.from_hf(model.architecture)


def new_model(
    config: ModelConfig | HFConfig,
    head: Head,
    split: Split,
    *,
    source: Path | None,
    seed: int,
    dtype: str,
) -> PackedModel:
    """This rank's part of a built-in decoder on the meta device, to be filled; a model of
    transformers with its weights, on the CPU."""
    if isinstance(config, ModelConfig):
        with torch.device("meta"):
            return build(config, head, split).to(getattr(torch, dtype))
    from slurmrl.models.hf_model import HFModel  # transformers takes seconds to import

    return HFModel(config, head, source=source, seed=seed, dtype=getattr(torch, dtype))


def whole_shapes(model: PackedModel) -> dict[str, Index]:
    """The shape of every parameter, by name, that this rank has a part of."""
    if isinstance(model.config, ModelConfig):
        return parameter_shapes(model.config, model.head)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@torch.no_grad()
def fill(
    local: Mapping[str, Tensor],
    boxes: Mapping[str, Box],
    shapes: Mapping[str, Index],
    config: ModelConfig,
    head: Head,
    *,
    seed: int,
    source: Path | None,
) -> None:
    """Write each parameter's box into its local chunk: from the folder ``source``, else random
    values that depend on (seed, name) only.

    A value head that the source does not have is zero, so that values start at zero.
    """
    with TensorSource(source) if source is not None else nullcontext() as files:
        weights = Weights(files, config, head) if files is not None else None
        for name, target in local.items():
            box = boxes[name]
            if not box.count:
                continue
            if weights is not None:
                target.copy_(weights.read(name, box))
            elif name == VALUE_HEAD:
                target.zero_()
            else:
                target.copy_(init_tensor(name, shapes[name], config, seed)[box.slices])
