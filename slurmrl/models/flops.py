"""Floating-point operations of a decoder, for model FLOP/s utilisation. Torch-free.

A multiplication and an addition count as two. Matrix products only, as in Chowdhery et al. 2022
(PaLM, appendix B): norms, activations and rotations are left out, and so is the recomputation of
checkpointed layers. Attention counts only the pairs a causal model needs, (n^2 + n) / 2 for a
sequence of n tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from slurmrl.models.config import Head, ModelConfig


def forward_flops_per_token(config: ModelConfig, head: Head = "lm") -> int:
    """Matrix products with the parameters, for one token; the embedding look-up is free."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = hidden * (q + 2 * kv) + q * hidden
    outputs = config.vocab_size if head == "lm" else 1
    return 2 * (config.num_layers * (attention + 3 * hidden * inner) + hidden * outputs)


def attention_flops(config: ModelConfig, length: int) -> int:
    """Scores and weighted sums of one sequence of ``length`` tokens, over all layers."""
    pairs = length * (length + 1) // 2
    return 4 * config.num_layers * config.num_heads * config.head_dim * pairs


def forward_flops(config: ModelConfig, lengths: Iterable[int], head: Head = "lm") -> int:
    """One forward pass over sequences of these lengths. Reading prompts and decoding token by
    token with a cache costs the same, save that nothing is computed behind the last token."""
    per_token = forward_flops_per_token(config, head)
    return sum(length * per_token + attention_flops(config, length) for length in lengths)


def train_flops(config: ModelConfig, lengths: Iterable[int], head: Head = "lm") -> int:
    """Forward and backward pass: the backward pass costs two forward passes."""
    return 3 * forward_flops(config, lengths, head)
