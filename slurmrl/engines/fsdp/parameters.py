"""Parameters of a model: construction, split over ranks, filling, saving and loading.

Parameters are filled box by box. A checkpoint has an engine's shards, moments, step count and
random state. For low-rank adapters, the module has initial values, dropout keys and merged weights.

Shapes: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from slurmrl.config.schema.roles import Lora, Model
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import TOKENS
from slurmrl.engines.role_weights import (
    BoxReader,
    Fingerprint,
    fill_saved,
    generator_of,
    random_entries,
    restore_random,
)
from slurmrl.errors import UsageError
from slurmrl.models.adapters import (
    BLOCK,
    LORA_A,
    LORA_B,
    adapted_weight,
    matrix_name,
    merge,
    refusal,
    trained_shapes,
)
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.base import PackedModel
from slurmrl.models.decoder import Decoder, build
from slurmrl.models.hf import as_array, as_tensor
from slurmrl.models.hf_config import HFConfig, constants_refusal
from slurmrl.models.hf_targets import TRANSPOSED
from slurmrl.models.lora import Adapters, attach
from slurmrl.models.model_tensors import open_folder
from slurmrl.models.packed import packed_positions, packed_rows
from slurmrl.models.parallel.boxes import SharedParameters, TensorSplit, refusals
from slurmrl.models.parallel.split import Axis, Split
from slurmrl.models.shapes import parameter_shapes
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint, RoleSnapshot, ShardHeader
from slurmrl.tensors.checkpoint.tensors import TensorEntry
from slurmrl.tensors.layout import Box, Index, Layout, TensorSpec
from slurmrl.tensors.ops.collectives import gathered
from slurmrl.tensors.ops.splitmix import hash64, mix, start
from slurmrl.tensors.parallel.groups import ParallelContext
from slurmrl.tensors.parallel.topology import exchanges_heads

if TYPE_CHECKING:
    from slurmrl.models.hf_model import HFModel

DEVICE_BLOCK = 2**24
"""Number of elements of a weight that a GPU merges at a time. Blocks of this size need few
launches, and 128 MiB for float32 values in addition to a copy in the weight's type."""


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

    The model on the meta device is this rank's part of a built-in decoder; the model on the CPU is
    from transformers.
    """
    if isinstance(config, ModelConfig):
        with torch.device("meta"):
            return build(config, head, split).to(getattr(torch, dtype))
    from slurmrl.models.hf_model import HFModel  # transformers takes seconds to import

    model = HFModel(config, head, source=source, seed=seed, dtype=getattr(torch, dtype))
    if split.tensor.size > 1:
        model.split(split.tensor)
    return model


def whole_shapes(model: PackedModel) -> dict[str, Index]:
    """Return a mapping from every parameter of which this rank has a part to its whole shape."""
    if isinstance(model.config, ModelConfig):
        return parameter_shapes(model.config, model.head)
    split = cast("HFModel", model).tensor
    if split is not None:
        return dict(split.whole)
    parameters = model.named_parameters()
    return {name: tuple(p.shape) for name, p in parameters if adapted_weight(name) is None}


def constant_specs(model: PackedModel, *, trained: bool) -> dict[str, TensorSpec]:
    """Return a mapping from the names of the model's constants to their specs.

    Raises UsageError if a checkpoint of a trained model cannot store the constants.
    """
    specs = {
        name: TensorSpec(tuple(values.shape), str(values.dtype).removeprefix("torch."))
        for name, values in model.constants().items()
    }
    if trained and (reason := constants_refusal(model.config.model_type, specs)):
        raise UsageError(reason)
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
    weights to which adapters belong. The tensors are read when the snapshot is written; the random
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
    return RoleSnapshot(header, (*entries, *random_entries()), layout, frozen)


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

    If a different number of ranks wrote the checkpoint, the random state is seeded from the step
    and the rank. Raises CheckpointError for a checkpoint of a different model, UsageError if the
    adapters belong to weights other than ``frozen``.
    """
    checkpoint = RoleCheckpoint(directory, role)
    checkpoint.check(layout.tensors)
    if None not in (checkpoint.frozen, frozen) and checkpoint.frozen != frozen:
        raise UsageError(
            f"the weights in {role}.path have changed since the adapters in {directory} were "
            f"trained: their fingerprint was {checkpoint.frozen} and is {frozen}. Restore the "
            "folder and resume the trial, or submit a new trial"
        )
    for shard in layout.held_by(rank):
        fill_saved(tensors[shard.name], checkpoint, shard.name, shard.box)
    restore_random(checkpoint, rank, layout.ranks)
    return checkpoint.step


def split_of(
    role: str, config: ModelConfig | HFConfig, context: ParallelContext, *, sequence: bool
) -> Split:
    """Return the split of parameters on this rank. Raises UsageError if no split is possible."""
    for axis in ("pp", "ep"):
        if context.axis_size(axis) > 1:
            raise UsageError(f"{role}: the fsdp engine does not split along {axis}")
    tensor, across = _axis(context, "tp"), _axis(context, "cp")
    if isinstance(config, HFConfig):
        only = ["a model of transformers supports d and t only"]
        problems = only if across.size > 1 or sequence else []
    else:
        problems = list(refusals(config, tensor.size))
    if problems:
        raise UsageError(f"{role}: " + "; ".join(problems))
    ring = isinstance(config, ModelConfig) and not exchanges_heads(
        config.num_heads, config.num_kv_heads, tensor.size, across.size
    )
    return Split(tensor, across, sequence, ring)


def tensor_split(model: PackedModel, split: Split) -> SharedParameters | None:
    if split.tensor.size == 1:
        return None
    if isinstance(model.config, HFConfig):
        return cast("HFModel", model).tensor
    return TensorSplit(model.config, split.tensor.size, split.sequence)


def _axis(context: ParallelContext, name: str) -> Axis:
    if context.axis_size(name) == 1:
        return Axis()
    return Axis(context.axis_rank(name), context.axis_size(name), context.group(name))


def attached(
    role: str, model: PackedModel, lora: Lora, source: Path | None, context: ParallelContext
) -> Adapters:
    """Add adapters to a model with weights of ``source``.

    Raises UsageError if the model cannot have adapters.
    """
    try:
        if isinstance(model, Decoder):
            if reason := refusal(model.config, lora):
                raise UsageError(reason)
            return attach(model, lora)
        assert source is not None, "adapters without a path are rejected at submission"
        from slurmrl.models import hf_adapters  # transformers takes seconds to import

        adapters = hf_adapters.attach_to(cast("HFModel", model), lora)
        part = (context.dp_rank, context.axis_size("dp"))
        hf_adapters.require_as_stored(cast("HFModel", model), source, *part)
        return adapters
    except UsageError as error:
        raise UsageError(f"{role}.lora is not allowed: {error}") from error


def frozen_tower(model: PackedModel, settings: Model) -> frozenset[str]:
    """Freeze the image encoder of a trained model unless ``settings.train_vision`` is true.

    Also freeze parts that no batch uses, because an optimizer would decay their weights. Return the
    names of the frozen parameters.
    """
    reader = None if isinstance(model, Decoder) else cast("HFModel", model).pictures
    if reader is None:
        return frozenset()
    parts = reader.unused if settings.train_vision else [reader.tower, *reader.unused]
    frozen = {id(p) for part in parts for p in part.requires_grad_(False).parameters()}
    return frozenset(name for name, p in model.named_parameters() if id(p) in frozen)


def trained_specs(model: PackedModel, lora: Lora) -> dict[str, Index]:
    """Return a mapping from every tensor that a model with adapters trains to its whole shape."""
    if isinstance(model.config, ModelConfig):
        return trained_shapes(model.config, model.head, lora)
    own = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    split = cast("HFModel", model).tensor
    return own if split is None else {n: split.whole_shape(n, s) for n, s in own.items()}


def is_transposed(config: ModelConfig | HFConfig) -> bool:
    """Return whether linear layers store the transposed weight (see `models.hf_targets`)."""
    return isinstance(config, HFConfig) and config.model_type in TRANSPOSED


def file_fingerprint(source: Path | None, context: ParallelContext) -> str:
    """Return the fingerprint of the tensors in a folder's files.

    Collective: each rank reads some of the tensors.
    """
    assert source is not None, "adapters without a path are rejected at submission"
    files, group = open_folder(source), context.groups.get("shard")
    specs = files.specs()
    found = Fingerprint({name: spec.shape for name, spec in specs.items()}, context.device)
    first, ranks = (0, 1) if group is None else (group.rank(), group.size())
    for name in sorted(specs)[first::ranks]:
        box = Box.whole(specs[name].shape)
        found.add(name, box, as_tensor(files.read(name, box), specs[name].dtype))
    if group is not None:
        found.add_up(group)
    return str(found)


def initial_matrix(
    shapes: Mapping[str, Index], seed: int, transposed: bool, name: str, box: Box
) -> Tensor:
    """Return a box of an adapter matrix's initial float32 values.

    The values depend only on ``seed``, ``name`` and ``box``. As in PEFT, B is zero, so that
    training starts with the frozen model. A is uniform in +-1 / sqrt(inputs). If the weights are
    ``transposed``, so are the matrices (see `models.hf_targets`).
    """
    if name.endswith(LORA_A if transposed else LORA_B):
        return torch.zeros(box.size)
    bound = shapes[name][0 if transposed else 1] ** -0.5
    whole = torch.empty(shapes[name]).uniform_(-bound, bound, generator=generator_of(name, seed))
    return whole[box.slices]


def dropout_keys(sample: SequenceSample, role: str, seed: int, steps: int) -> Tensor:
    """Return a dropout key for each token, [T] int64 in host memory.

    A key depends on the token's sample, sequence and position, and on the number of earlier
    optimizer ``steps``.
    """
    states = [
        start(hash64(role), seed, steps, hash64(name), sequence)
        for name, row in zip(sample.ids, sample.lengths[TOKENS], strict=True)
        for sequence in range(len(row))
    ]
    cu_seqlens, tokens = sample.cu_seqlens(TOKENS), sample.tensor(TOKENS).shape[0]
    rows = packed_rows(cu_seqlens, tokens)
    return mix(torch.tensor(states)[rows] ^ packed_positions(cu_seqlens, tokens))


class MergedWeights(Mapping[str, Tensor]):
    """This rank's chunks of a decoder's weights, each merged with its adapter: W + scale * B A.

    A merged weight is rounded to the type of W (see `models.adapters`). A merged weight is computed
    from the frozen W when it is read; only the last one is kept. The constructor is collective.
    """

    def __init__(
        self, local: Mapping[str, Tensor], adapters: Adapters, context: ParallelContext
    ) -> None:
        """``local`` are this rank's chunks of all parameters."""
        self._scale = adapters.scale
        self._weights = {n: w for n, w in local.items() if adapted_weight(n) is None}
        self._rows = {
            weight: values
            for name, values in local.items()
            if name.endswith(LORA_B) and (weight := adapted_weight(name)) is not None
        }
        """This rank's rows of each B, which are the rows of its weight."""
        chunks = {weight: local[matrix_name(weight, LORA_A)] for weight in self._rows}
        self._inner = _gathered_rows(chunks, adapters.rank, context)
        """Every A with all of its rows."""
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        if name not in self._rows:
            return weight
        if self._last is None or self._last[0] != name:
            self._last = None  # Free the last weight before the next weight is allocated.
            merged = merged_weight(weight, self._rows[name], self._inner[name], self._scale)
            self._last = name, merged
        return self._last[1]

    @torch.no_grad()
    def sample(self, most: int) -> list[Tensor]:
        """Return equally spaced rows of each adapted weight, flat, in float32 without rounding.

        The result has about ``most`` values in all, and at least one row of each weight.
        """
        every = sum(self._weights[name].numel() for name in self._rows) // most | 1
        sampled = []
        for name, b in self._rows.items():
            a = self._inner[name]
            weight = self._weights[name][::every].to(a.device, torch.float32)
            merged = weight.addmm(b[::every].to(a.device), a, alpha=self._scale)
            sampled.append(merged.flatten())
        return sampled

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


@torch.no_grad()
def merged_weight(weight: Tensor, b: Tensor, a: Tensor, scale: float) -> Tensor:
    """Return ``weight`` + scale * b a, in the type and on the device of ``weight``.

    The sum is computed on the device of ``a``, block by block (see `models.adapters`).
    """
    device, merged = a.device, torch.empty_like(weight)
    block = BLOCK if device.type == "cpu" else DEVICE_BLOCK
    each = max(1, block // max(1, weight.shape[1]))
    for first in range(0, weight.shape[0], each):
        rows = slice(first, first + each)
        part = torch.empty_like(weight[rows], device=device)
        merge(part, weight[rows].to(device), b[rows].to(device), a, scale, block=block)
        merged[rows] = part
    return merged


def _gathered_rows(
    chunks: Mapping[str, Tensor], rows: int, context: ParallelContext
) -> dict[str, Tensor]:
    """Gather all ``rows`` of each matrix in one collective.

    Data- and context-parallel ranks have ceil-chunks of the rows.
    """
    ranks = context.axis_size("dp") * context.axis_size("cp")
    if ranks == 1:
        return {name: chunk.to(context.device) for name, chunk in chunks.items()}
    each = -(-rows // ranks)
    padded = []
    for chunk in chunks.values():
        part = torch.zeros((each, chunk.shape[1]), device=context.device)
        part[: chunk.shape[0]] = chunk
        padded.append(part.flatten())
    whole = gathered(torch.cat(padded)[None], context.group("shard"))
    parts = whole.split_with_sizes([part.numel() for part in padded], 1)
    return {
        name: part.reshape(ranks * each, -1)[:rows]
        for name, part in zip(chunks, parts, strict=True)
    }
