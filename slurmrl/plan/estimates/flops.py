"""Estimates of a call's floating-point operations and seconds. Sources: docs/allocation.md.

A multiply-add counts as two operations. Only matrix products count; attention counts the pairs of
tokens that the causal mask keeps.
"""

from __future__ import annotations

from typing import Final

from slurmrl.plan.dataflow import Head, Method
from slurmrl.plan.estimates.hardware import Gpu
from slurmrl.plan.estimates.lengths import Lengths
from slurmrl.plan.estimates.shape import ModelShape

UTILISATION: Final = 0.4
"""Model FLOPs utilisation that training is assumed to reach."""
BACKWARD: Final = 2
"""Cost of a backward pass in forward passes."""


def forward_flops_per_token(shape: ModelShape, head: Head) -> int:
    """Operations of the matrix products with the parameters that are active for a token."""
    attention = 2 * shape.hidden * (shape.queries + shape.keys)
    dense = shape.mlp_matrices * shape.hidden * shape.inner
    routed = shape.experts_per_token * shape.expert_inner + shape.shared_inner
    sparse = shape.mlp_matrices * shape.hidden * routed + shape.hidden * shape.experts
    plain = shape.layers - shape.expert_layers
    outputs = shape.vocabulary if head == "lm" else 1
    layers = shape.layers * attention + plain * dense + shape.expert_layers * sparse
    return 2 * (layers + shape.hidden * outputs)


def attention_flops(shape: ModelShape, length: int) -> int:
    """Operations of the scores and the weighted sums of one sequence."""
    return 4 * shape.layers * shape.queries * (length * (length + 1) // 2)


def call_flops(
    shape: ModelShape,
    head: Head,
    method: Method,
    lengths: Lengths,
    passes: int,
    *,
    frozen: bool = False,
) -> int:
    """Operations for all sequences of a step at full length; a train_step makes ``passes`` passes
    over them. Weights that are ``frozen`` under adapters need no gradients."""
    total = lengths.sequences * forward_flops(shape, head, lengths.longest)
    if method is Method.GENERATE:  # an item's prompt is read once
        prompt = lengths.longest - lengths.new_tokens
        total -= (lengths.sequences - lengths.sequences // lengths.group) * forward_flops(
            shape, head, prompt
        )
    if method is Method.TRAIN_STEP:
        tokens = lengths.sequences * lengths.longest * int(frozen)
        total = total * (1 + BACKWARD) - tokens * forward_flops_per_token(shape, head)
        total *= passes
    return total


def forward_flops(shape: ModelShape, head: Head, length: int) -> int:
    """Operations of a forward pass over one sequence."""
    return length * forward_flops_per_token(shape, head) + attention_flops(shape, length)


def compute_seconds(flops: int, gpus: int, gpu: Gpu) -> float:
    return flops / (gpus * gpu.flops_per_s * UTILISATION)


def decode_seconds(new_tokens: int, bytes_per_token: float, gpu: Gpu) -> float:
    """The memory-bandwidth bound: each generated token reads a rank's weights, keys and values
    once."""
    return new_tokens * bytes_per_token / gpu.bytes_per_s
