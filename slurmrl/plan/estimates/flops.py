"""Estimates of a call's floating-point operations and seconds. Sources: docs/allocation.md.

A multiplication and an addition count as two; matrix products only, attention over the pairs that a
causal model needs.
"""

from __future__ import annotations

from typing import Final

from slurmrl.graph.call import Head, Method
from slurmrl.plan.estimates.hardware import Gpu
from slurmrl.plan.estimates.lengths import Lengths
from slurmrl.plan.estimates.shape import ModelShape

UTILISATION: Final = 0.4
"""Share of the peak that training reaches."""
BACKWARD: Final = 2
"""Forward passes that a backward pass costs."""


def forward_flops_per_token(shape: ModelShape, head: Head) -> int:
    """Products with the parameters that a token passes."""
    attention = 2 * shape.hidden * (shape.queries + shape.keys)
    dense = shape.mlp_matrices * shape.hidden * shape.inner
    routed = shape.experts_per_token * shape.expert_inner + shape.shared_inner
    sparse = shape.mlp_matrices * shape.hidden * routed + shape.hidden * shape.experts
    plain = shape.layers - shape.expert_layers
    outputs = shape.vocabulary if head == "lm" else 1
    layers = shape.layers * attention + plain * dense + shape.expert_layers * sparse
    return 2 * (layers + shape.hidden * outputs)


def attention_flops(shape: ModelShape, length: int) -> int:
    """Scores and weighted sums of one sequence."""
    return 4 * shape.layers * shape.queries * (length * (length + 1) // 2)


def call_flops(shape: ModelShape, head: Head, method: Method, lengths: Lengths, passes: int) -> int:
    """All sequences of a step at full length; a train_step goes ``passes`` times through them."""
    one = lengths.longest * forward_flops_per_token(shape, head)
    total = lengths.sequences * (one + attention_flops(shape, lengths.longest))
    return total * passes * (1 + BACKWARD) if method is Method.TRAIN_STEP else total


def compute_seconds(flops: int, gpus: int, gpu: Gpu) -> float:
    return flops / (gpus * gpu.flops_per_s * UTILISATION)


def decode_seconds(new_tokens: int, bytes_per_token: float, gpu: Gpu) -> float:
    """Each generated token reads a rank's weights and keys and values once (no batch of it can be
    faster than that)."""
    return new_tokens * bytes_per_token / gpu.bytes_per_s
