"""Floating-point operations of a decoder, for model FLOP/s utilisation. Torch-free.

A multiplication and an addition count as two. Matrix products only, as in Chowdhery et al. 2022
(PaLM, appendix B): norms, activations and rotations are left out, and so is the recomputation of
checkpointed layers. Attention counts only the pairs a causal model needs, (n^2 + n) / 2 for a
sequence of n tokens, fewer with a sliding window.
"""

from __future__ import annotations

from collections.abc import Iterable

from slurmrl.models.config import Head, ModelConfig


def forward_flops_per_token(config: ModelConfig, head: Head = "lm") -> int:
    """Matrix products with the parameters that a token uses; the embedding lookup is free."""
    hidden, moe = config.hidden_size, config.moe
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = hidden * (q + 2 * kv) + q * hidden
    dense = (3 if config.family.gated else 2) * hidden * config.intermediate_size
    sparse = hidden * (3 * moe.inner * moe.per_token + moe.experts) if moe else 0
    with_experts = len(moe.layers) if moe else 0
    layers = config.num_layers * (attention + dense) + with_experts * (sparse - dense)
    outputs = config.vocab_size if head == "lm" else 1
    return 2 * (layers + hidden * outputs)


def attention_flops(config: ModelConfig, length: int) -> int:
    """Scores and weighted sums of one sequence of ``length`` tokens, over all layers."""
    pairs = sum(_pairs(length, window) for window in config.windows)
    return 4 * config.num_heads * config.head_dim * pairs


def _pairs(length: int, window: int | None) -> int:
    """Number of (query, key) pairs."""
    seen = min(length, window or length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def forward_flops(config: ModelConfig, lengths: Iterable[int], head: Head = "lm") -> int:
    """One forward pass over sequences of these lengths. Prefill and decoding with a cache cost the
    same, except that the last token is not processed."""
    per_token = forward_flops_per_token(config, head)
    return sum(length * per_token + attention_flops(config, length) for length in lengths)


def train_flops(config: ModelConfig, lengths: Iterable[int], head: Head = "lm") -> int:
    """Forward and backward pass: the backward pass costs two forward passes."""
    return 3 * forward_flops(config, lengths, head)
