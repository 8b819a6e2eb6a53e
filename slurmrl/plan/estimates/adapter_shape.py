"""Sizes of adapters, and of everything that a role trains."""

from __future__ import annotations

from typing import Final

from slurmrl.config.allocation import Allocation
from slurmrl.config.schema import Lora, Model
from slurmrl.errors import UsageError
from slurmrl.plan.dataflow import Head
from slurmrl.plan.engine_rules import HF
from slurmrl.plan.estimates.shape import (
    ModelShape,
    config_values,
    copies_of,
    shard_parameters,
)
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
