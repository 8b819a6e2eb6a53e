"""Numbers of parameters of an architecture on a rank: of all and of those that are trained."""

from __future__ import annotations

from dataclasses import dataclass

from slurmrl.allocation import Allocation
from slurmrl.config.schema import Lora, Model
from slurmrl.graph.call import Head
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
    tp, hidden = allocation.sizes["tp"], shape.hidden
    keys, inner = shape.kv_heads_of_rank(tp) * shape.head_dim, shape.inner / tp
    attention = {
        "q_proj": hidden + shape.queries / tp,
        "k_proj": hidden + keys,
        "v_proj": hidden + keys,
        "o_proj": hidden + shape.queries / tp,
    }
    dense = dict.fromkeys(
        ("gate_proj", "up_proj", "down_proj")[-shape.mlp_matrices :], hidden + inner
    )
    sizes = {name: shape.layers * size for name, size in attention.items()}
    sizes |= {name: (shape.layers - shape.expert_layers) * size for name, size in dense.items()}
    adapted = sum(size for name, size in sizes.items() if lora.adapts(name))
    return lora.rank * adapted + (hidden if head == "value" else 0)


def trained_shard(model: Model, shape: ModelShape, allocation: Allocation, head: Head) -> float:
    """Elements of one rank's shard of what is trained of a model."""
    if model.lora is None:
        return shard_parameters(shape, allocation, head)
    return adapter_parameters(shape, allocation, model.lora, head) / _copies(allocation)[0]
