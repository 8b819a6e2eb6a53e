"""Sizes that adapters and recorded experts add, and the parameters that a role trains.

With ``rollout.replay_experts`` each token also has the numbers of its experts in each layer that
has some: in samples, on GPUs that replay them, and in servers. Engines need further forms of these
records while they compute a micro-batch.
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
"""The function is resolved by name, because its layer is above the plan's."""


def adapter_parameters(
    model: Model, shape: ModelShape, allocation: Allocation, head: Head
) -> float:
    """Elements of a tensor rank's adapters, and of a value head.

    The number is exact for a model of transformers, whose layers transformers lists. Where tensor
    ranks split a weight by rows, each has a copy of A; where they split it by columns, a copy of B.
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
    """Elements of the whole weights that have adapters."""
    lora = model.lora
    assert lora is not None, "a model with adapters"
    if model.implementation == HF:
        return sum(rows * columns for rows, columns in _adapted(model, lora))
    return sum(layers * whole * side for layers, whole, side in _split_sides(shape, 1, lora))


def _adapted(model: Model, lora: Lora) -> list[tuple[int, int]]:
    """Shapes of the weights with adapters of a model of transformers."""
    try:
        shapes = resolve(ADAPTED_SHAPES)(config_values(model), "lm", lora)
    except UsageError:
        return []  # reported by the check of weights
    return list(shapes.values())


def _split_sides(shape: ModelShape, tp: int, lora: Lora) -> list[tuple[int, float, float]]:
    """Return the number of layers and the sides of each kind of weight with an adapter.

    The number counts the layers that have the kind of weight. The last side is a tensor rank's part
    of the side that tensor ranks split.
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
    """Trained elements of a model in one rank's shard."""
    if model.lora is None:
        still = 0 if model.train_vision else shape.tower
        return shard_parameters(shape, allocation, head) - still / copies_of(allocation)[0]
    return adapter_parameters(model, shape, allocation, head) / copies_of(allocation)[0]


NUMBER: Final = 2
"""Bytes of the number of an expert in a sample and in the built-in engine's cache: int16."""
REPLAYED: Final = 8
"""Bytes of the number of an expert that the built-in decoder replays: int64."""
SERVED: Final = 4
"""Bytes of the number of an expert in SGLang's host memory: int32."""


def numbers(shape: ModelShape) -> int:
    """Experts of a token in all layers."""
    return shape.expert_layers * shape.experts_per_token


def replayed(
    shape: ModelShape, allocation: Allocation, *, batch: int, micro: int, layers: float
) -> int:
    """Return the bytes on a GPU of replayed experts while a model computes.

    They hold records of ``batch`` tokens, a copy of the records of a micro-batch, and the engine's
    own form of it. ``micro`` is the tokens of a micro-batch on one context rank; each rank has the
    record of all of them. ``layers`` is the layers of a stage times the micro-batches that are on
    their way through it.

    megatron's routers have a mask with a byte for each token, layer and expert.
    """
    whole = micro * allocation.sizes["cp"]
    size: float = NUMBER * numbers(shape) * (max(batch, whole) + whole)
    if allocation.backend == "megatron":
        share = shape.expert_layers / shape.layers
        return round(size + micro * layers * share * shape.experts)
    return round(size + REPLAYED * numbers(shape) * (whole + micro))


def beside_cache(shape: ModelShape) -> int:
    """Return the bytes of a token in the cache of the built-in engine."""
    return NUMBER * numbers(shape)


def on_host_of_server(shape: ModelShape, tokens: float) -> int:
    """Return the page-locked host memory in bytes of each tensor rank of an SGLang server.

    It holds the experts of all layers, dense ones included, for each of the ``tokens`` that the
    server's cache of keys and values takes.
    """
    return round(SERVED * shape.layers * shape.experts_per_token * tokens)
