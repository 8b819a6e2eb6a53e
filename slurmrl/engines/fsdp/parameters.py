"""Parameters of a model: construction, split over ranks, filling, saving and loading.

Parameters are filled box by box. An engine saves and loads its shards, moments, step count and
random state.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from slurmrl.engines import role_state
from slurmrl.engines.initial_weights import BoxReader
from slurmrl.engines.role_state import fill_saved
from slurmrl.errors import UsageError
from slurmrl.models.base import PackedModel
from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.decoder import build
from slurmrl.models.hf import as_array
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.parallel.boxes import TensorSplit, refusals
from slurmrl.models.parallel.split import Axis, Split
from slurmrl.models.shapes import parameter_shapes
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint, RoleSnapshot, ShardHeader
from slurmrl.tensors.checkpoint.tensors import TensorEntry
from slurmrl.tensors.layout import Box, Index, Layout, TensorSpec
from slurmrl.tensors.parallel.groups import ParallelContext


def new_model(
    config: ModelConfig | HFConfig,
    head: Head,
    split: Split,
    *,
    source: Path | None,
    seed: int,
    dtype: str,
) -> PackedModel:
    """Return a model without weights on the meta device, or with weights on the CPU.

    The former is this rank's part of a built-in decoder, the latter a model of transformers.
    """
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
    """The model's constants, by name.

    Raises UsageError if a checkpoint of a trained model cannot store them.
    """
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


def snapshot(
    role: str,
    rank: int,
    step: int,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    frozen: str | None,
) -> RoleSnapshot:
    """Return this rank's part of a checkpoint.

    ``tensors`` are its chunks, by their names in ``layout``. ``frozen`` is the fingerprint of the
    weights that adapters belong to. The tensors are read when the snapshot is written; the random
    state is read now.
    """
    entries = (
        TensorEntry(
            shard.name,
            TensorSpec(shard.box.size, layout.tensors[shard.name].dtype),
            partial(as_array, tensors[shard.name]),
        )
        for shard in layout.held_by(rank)
    )
    header = ShardHeader(role, rank, layout.ranks, step)
    return RoleSnapshot(header, (*entries, *role_state.random_entries()), layout, frozen)


@torch.no_grad()
def load(
    directory: Path,
    role: str,
    rank: int,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    frozen: str | None,
) -> int:
    """Fill this rank's chunks and set its random state. Return the number of optimizer steps.

    If another number of ranks wrote the checkpoint, the random state is seeded from the step and
    the rank. Raises CheckpointError for a checkpoint of another model, UsageError for adapters of
    other weights than those that are ``frozen``.
    """
    checkpoint = RoleCheckpoint(directory, role)
    checkpoint.check(layout.tensors)
    if None not in (checkpoint.frozen, frozen) and checkpoint.frozen != frozen:
        raise UsageError(
            f"{role}.path holds other weights than when the adapters in {directory} were trained: "
            f"their fingerprint is {frozen} now and was {checkpoint.frozen}. Put the folder back "
            "as it was and resume the trial, or begin a new one"
        )
    for shard in layout.held_by(rank):
        fill_saved(tensors[shard.name], checkpoint, shard.name, shard.box)
    role_state.restore_random(checkpoint, rank, layout.ranks)
    return checkpoint.step


def split_of(
    role: str, config: ModelConfig | HFConfig, context: ParallelContext, *, sequence: bool
) -> Split:
    """This rank's split. Raises UsageError if the model cannot be split that way."""
    for axis in ("pp", "ep"):
        if context.axis_size(axis) > 1:
            raise UsageError(f"{role}: the fsdp engine does not split along {axis}")
    tensor, across = _axis(context, "tp"), _axis(context, "cp")
    if isinstance(config, HFConfig):
        only_data = ["a model of transformers supports data parallelism only (d)"]
        problems = only_data if tensor.size * across.size > 1 else []
    else:
        problems = list(refusals(config, tensor.size, across.size))
    if problems:
        raise UsageError(f"{role}: " + "; ".join(problems))
    return Split(tensor, across, sequence)


def tensor_split(config: ModelConfig | HFConfig, split: Split) -> TensorSplit | None:
    if isinstance(config, HFConfig) or split.tensor.size == 1:
        return None
    return TensorSplit(config, split.tensor.size, split.sequence)


def _axis(context: ParallelContext, name: str) -> Axis:
    if context.axis_size(name) == 1:
        return Axis()
    return Axis(context.axis_rank(name), context.axis_size(name), context.group(name))
