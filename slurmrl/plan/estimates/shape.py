"""The sizes of an architecture that a plan needs, from a Hugging Face ``config.json``.
(The engines' own checks decide whether they can run it.)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from slurmrl.config.schema import Model
from slurmrl.errors import UsageError
from slurmrl.plan.model_files import config_values
from slurmrl.registry import resolve

FAMILIES: Final = "slurmrl.models.families:FAMILIES"
"""The built-in decoder's table of families, for the defaults of absent fields."""
MOST_LAYERS: Final = 10**5
LARGEST: Final = 10**9
"""Larger sizes are errors, which the check of the weights reports."""
PLAIN_MLP: Final = frozenset({"gpt2", "gpt_neox", "opt", "phi"})
"""Families whose feed-forward block has two matrices; the others also have a gate."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes are counts of elements, heads or layers."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int | None
    tied: bool
    mlp_matrices: int = 3
    experts: int = 0
    """Experts of a layer; 0 for a dense model."""
    experts_per_token: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    """Inner size of the shared experts, which process every token."""
    dense_layers: int = 0
    """Number of layers without experts in a model with experts."""

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def expert_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    def kv_heads_of_rank(self, tp: int) -> int:
        """Key-value heads of one tensor rank; with fewer heads than ranks, heads are replicated."""
        return max(1, -(-self.kv_heads // tp))


def shape_of(model: Model) -> ModelShape | None:
    """The shape of a role's architecture; None if it is unknown or incomplete."""
    try:
        values = config_values(model)
    except UsageError:
        return None
    return read(values) if values else None


def read(values: Mapping[str, Any]) -> ModelShape | None:
    """The shape in a ``config.json`` object; None if sizes are missing."""
    family = resolve(FAMILIES).get(values.get("model_type"))
    stated = {name: value for name, value in values.items() if value is not None}
    full = {**(family.defaults if family else {}), **stated}
    hidden = _number(full, "hidden_size", "n_embd", "d_model")
    layers = _number(full, "num_hidden_layers", "n_layer")
    heads = _number(full, "num_attention_heads", "n_head")
    vocabulary = _number(full, "vocab_size")
    if not (hidden and layers and heads and vocabulary) or layers > MOST_LAYERS:
        return None
    inner = _number(full, "intermediate_size", "n_inner") or 4 * hidden
    experts = _number(full, "num_experts", "num_local_experts", "n_routed_experts") or 0
    return ModelShape(
        hidden=hidden,
        inner=inner,
        layers=layers,
        heads=heads,
        kv_heads=_number(full, "num_key_value_heads") or heads,
        head_dim=_number(full, "head_dim") or max(hidden // heads, 1),
        vocabulary=vocabulary,
        positions=_number(full, "max_position_embeddings", "n_positions"),
        tied=full.get("tie_word_embeddings") is True,
        mlp_matrices=2 if full.get("model_type") in PLAIN_MLP else 3,
        experts=experts,
        experts_per_token=_number(full, "num_experts_per_tok") or min(2, experts),
        expert_inner=_number(full, "moe_intermediate_size") or inner,
        shared_inner=_shared(full),
        dense_layers=_dense_layers(full, layers),
    )


def _number(values: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = values.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST:
            return value
    return None


def _shared(values: Mapping[str, Any]) -> int:
    number = _number(values, "n_shared_experts") or 0
    size = _number(values, "moe_intermediate_size") or 0
    return _number(values, "shared_expert_intermediate_size") or number * size


def _dense_layers(values: Mapping[str, Any], layers: int) -> int:
    listed = values.get("mlp_only_layers")
    dense = listed if isinstance(listed, list) else []
    first, step = _number(values, "first_k_dense_replace"), _number(values, "decoder_sparse_step")
    return sum(n < (first or 0) or n in dense or (n + 1) % (step or 1) > 0 for n in range(layers))
