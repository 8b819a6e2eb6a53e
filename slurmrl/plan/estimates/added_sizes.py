"""Sizes that adapters and recorded experts add, and the parameters that a role trains.

With ``rollout.replay_experts``, each token has a record of its experts in each layer with experts.
Samples, GPUs that replay the experts, and servers hold these records. Engines need copies in other
forms while they compute a micro-batch.
"""

from __future__ import annotations

from typing import Final

from slurmrl.config.allocation import Allocation
from slurmrl.config.schema import Lora, Model
from slurmrl.errors import UsageError
from slurmrl.plan.dataflow import Head
from slurmrl.plan.engine_rules import HF
from slurmrl.plan.estimates.shape import ModelShape, config_values, copies_of, shard_parameters
from slurmrl.registry import resolve

ADAPTED_SHAPES: Final = "slurmrl.models.hf_adapters:adapted_shapes"
"""Name of a function in a room that ``plan`` must not import."""


def adapter_parameters(
    model: Model, shape: ModelShape, allocation: Allocation, head: Head
) -> float:
    """Return the number of elements of a tensor rank's adapters and value head.

    The number is exact for a model of transformers. If tensor ranks split a weight by rows, each
    rank has a copy of A; if they split it by columns, each rank has a copy of B.
    """
    lora, hidden = model.lora, shape.hidden
    assert lora is not None, "a model with adapters"
    if model.implementation == HF:
        adapted: float = sum(rows + columns for rows, columns in _adapted(model, lora))
    else:
        split = _split_sides(shape, allocation.sizes["tp"], lora)
        adapted = sum(layers * (whole + side) for layers, whole, side in split)
    return lora.rank * adapted + (hidden if head == "value" else 0)


def adapted_parameters(model: Model, shape: ModelShape) -> float:
    """Return the number of elements of the complete weights that have adapters."""
    lora = model.lora
    assert lora is not None, "a model with adapters"
    if model.implementation == HF:
        return sum(rows * columns for rows, columns in _adapted(model, lora))
    return sum(layers * whole * side for layers, whole, side in _split_sides(shape, 1, lora))


def _adapted(model: Model, lora: Lora) -> list[tuple[int, int]]:
    """Return the shapes of the weights with adapters in a model of transformers."""
    try:
        shapes = resolve(ADAPTED_SHAPES)(config_values(model), "lm", lora)
    except UsageError:
        return []  # The check of weights reports the error.
    return list(shapes.values())


def _split_sides(shape: ModelShape, tp: int, lora: Lora) -> list[tuple[int, float, float]]:
    """Return, for each kind of weight with an adapter, its number of layers and its two sides.

    Only layers with this kind of weight count. Tensor ranks split the second side, so the result
    has a rank's part of this side.
    """
    queries, keys = shape.queries / tp, shape.kv_heads_of_rank(tp) * shape.head_dim
    hidden = float(shape.hidden)
    sides = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}
    attention = {name: (hidden, side) for name, side in sides.items()}
    if shape.latent is not None:
        attention = shape.latent.matrices(tp)
    block = ("gate_proj", "up_proj", "down_proj")[-shape.mlp_matrices :]
    plain = shape.layers - shape.expert_layers
    kinds = [(name, shape.layers, *both) for name, both in attention.items()]
    kinds += [(name, plain, hidden, shape.inner / tp) for name in block]
    if shape.shared_inner:
        kinds += [(name, shape.expert_layers, hidden, shape.shared_inner / tp) for name in block]
    return [(count, whole, side) for name, count, whole, side in kinds if lora.adapts(name)]


def trained_shard(model: Model, shape: ModelShape, allocation: Allocation, head: Head) -> float:
    """Return the number of a model's trained elements in one rank's shard."""
    if model.lora is None:
        still = 0 if model.train_vision else shape.tower
        return shard_parameters(shape, allocation, head) - still / copies_of(allocation)[0]
    return adapter_parameters(model, shape, allocation, head) / copies_of(allocation)[0]


NUMBER: Final = 2
"""Bytes of an expert's index in a sample and in the built-in engine's cache (int16)."""
REPLAYED: Final = 8
"""Bytes of an expert's index that the built-in decoder replays (int64)."""
SERVED: Final = 4
"""Bytes of an expert's index in SGLang's host memory (int32)."""


def numbers(shape: ModelShape) -> int:
    """Return the number of recorded experts of a token, summed over all layers."""
    return shape.expert_layers * shape.experts_per_token


def replayed(
    shape: ModelShape, allocation: Allocation, *, batch: int, micro: int, layers: float
) -> int:
    """Return the bytes of replayed experts on a GPU while a model computes.

    The GPU holds the records of ``batch`` tokens, a copy of a micro-batch's records, and the
    engine's own form of this copy. Megatron's form is a mask with a byte for each token, layer and
    expert.

    A micro-batch has ``micro`` tokens on each context rank, but every rank has the records of all
    its tokens. ``layers`` is the number of layers in a stage times the micro-batches in flight.
    """
    whole = micro * allocation.sizes["cp"]
    size: float = NUMBER * numbers(shape) * (max(batch, whole) + whole)
    if allocation.backend == "megatron":
        share = shape.expert_layers / shape.layers
        return round(size + micro * layers * share * shape.experts)
    return round(size + REPLAYED * numbers(shape) * (whole + micro))


def beside_cache(shape: ModelShape) -> int:
    """Return the bytes of a token's recorded experts in the cache of the built-in engine."""
    return NUMBER * numbers(shape)


def on_host_of_server(shape: ModelShape, tokens: float) -> int:
    """Return the bytes of page-locked host memory that a tensor rank of SGLang needs for experts.

    The memory has the experts of all layers, including dense layers, for each of the ``tokens`` in
    the server's cache of keys and values.
    """
    return round(SERVED * shape.layers * shape.experts_per_token * tokens)
