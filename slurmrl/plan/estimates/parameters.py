"""Numbers of parameters of an architecture on a rank: of all and of those that are trained."""

from __future__ import annotations

from dataclasses import dataclass

from slurmrl.config.allocation import Allocation
from slurmrl.config.schema import Lora, Model
from slurmrl.plan.dataflow import Head
from slurmrl.plan.estimates.shape import ModelShape


@dataclass(frozen=True)
class Parameters:
    """Elements on one rank before sharding; experts have a layout of their own."""

    dense: float
    experts: float

    @property
    def total(self) -> float:
        return self.dense + self.experts


def layer_parameters(shape: ModelShape, allocation: Allocation, *, moe: bool) -> Parameters:
    """The parameters of one layer on one tensor rank, without biases."""
    tp = allocation.sizes["tp"]
    queries = shape.queries / tp
    keys = shape.kv_heads_of_rank(tp) * shape.head_dim
    attention = shape.hidden * (2 * queries + 2 * keys) + 2 * shape.hidden
    if not moe:
        return Parameters(attention + shape.mlp_matrices * shape.hidden * shape.inner / tp, 0)
    expert = shape.mlp_matrices * shape.hidden * shape.expert_inner
    shared = shape.mlp_matrices * shape.hidden * shape.shared_inner / tp
    own = shape.experts / allocation.sizes["ep"] * expert / expert_tp(allocation)
    return Parameters(attention + shape.hidden * shape.experts + shared, own)


def expert_tp(allocation: Allocation) -> int:
    """Tensor-parallel size of the experts; without a layout of their own, that of the model."""
    return allocation.experts.tp if allocation.experts else allocation.sizes["tp"]


def parameters(shape: ModelShape, allocation: Allocation, head: Head) -> Parameters:
    """The parameters of the fullest pipeline stage."""
    pp, tp = allocation.sizes["pp"], allocation.sizes["tp"]
    plain = layer_parameters(shape, allocation, moe=False)
    moe = layer_parameters(shape, allocation, moe=True)
    count, sparse = shape.layers / pp, shape.expert_layers / pp
    dense = (count - sparse) * plain.dense + sparse * moe.dense
    embedding = shape.vocabulary * shape.hidden / tp
    outputs = embedding if head == "lm" else shape.hidden
    last = 0.0 if shape.tied and head == "lm" and pp == 1 else outputs
    ends = embedding + last if pp == 1 else max(embedding, last)
    return Parameters(dense + ends + shape.hidden, sparse * moe.experts)


def _copies(allocation: Allocation) -> tuple[int, int]:
    """Number of replicas of dense parameters and of experts."""
    dense = allocation.sizes["dp"] * allocation.sizes["cp"]
    return dense, allocation.experts.dp if allocation.experts else dense


def shard_parameters(shape: ModelShape, allocation: Allocation, head: Head) -> float:
    """Elements of one rank's shard: parameters are sharded over their replicas."""
    own = parameters(shape, allocation, head)
    dense, experts = _copies(allocation)
    return own.dense / dense + own.experts / experts


def adapter_parameters(shape: ModelShape, allocation: Allocation, lora: Lora, head: Head) -> float:
    """Elements of a tensor rank's adapters, and of a value head. Where tensor ranks split a weight
    by rows, each has a copy of A; where they split it by columns, a copy of B."""
    hidden, split = shape.hidden, _split_sides(shape, allocation.sizes["tp"], lora)
    adapted = sum(layers * (hidden + side) for layers, side in split)
    return lora.rank * adapted + (hidden if head == "value" else 0)


def adapted_parameters(shape: ModelShape, lora: Lora) -> float:
    """Elements of the whole weights that have adapters."""
    return sum(layers * shape.hidden * side for layers, side in _split_sides(shape, 1, lora))


def _split_sides(shape: ModelShape, tp: int, lora: Lora) -> list[tuple[int, float]]:
    """For each kind of weight with an adapter, the number of layers that have it, and a tensor
    rank's part of the side that tensor ranks split; the other side is the hidden size."""
    queries, keys = shape.queries / tp, shape.kv_heads_of_rank(tp) * shape.head_dim
    attention = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}
    dense = ("gate_proj", "up_proj", "down_proj")[-shape.mlp_matrices :]
    plain = shape.layers - shape.expert_layers
    sides = {name: (shape.layers, side) for name, side in attention.items()}
    sides |= dict.fromkeys(dense, (plain, shape.inner / tp))
    return [side for name, side in sides.items() if lora.adapts(name)]


def trained_shard(model: Model, shape: ModelShape, allocation: Allocation, head: Head) -> float:
    """Elements of one rank's shard of what is trained of a model."""
    if model.lora is None:
        return shard_parameters(shape, allocation, head)
    return adapter_parameters(shape, allocation, model.lora, head) / _copies(allocation)[0]
