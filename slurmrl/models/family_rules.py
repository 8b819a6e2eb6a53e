"""The entries of the table of families, and the sizes of latent attention. Torch-free.

In latent attention (MLA; DeepSeek-AI 2024, DeepSeek-V2, section 2.1), keys and values of all heads
come from one latent vector per token, and queries may come from another latent vector. Each key
also has rotated dims. These dims are equal in all heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PARTIAL = "partial_rotary_factor"
WHOLE_HEADS = (None, 1)
"""Values of the field `PARTIAL` with which all dims of a head are rotated."""

Switch = bool | str


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The names of mixture-of-experts layers in a family's files and config."""

    block: str = "mlp"
    """Name of the feed-forward block in the files."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    count: str = "num_local_experts"
    """Config field of the number of experts."""
    inner: str = "intermediate_size"
    """Config field of an expert's inner size."""
    normalized: Switch = True
    """Whether the weights of a token's experts are scaled to a sum of 1."""
    clamped: bool = False
    """Whether gates are clamped, and all experts of a layer are one tensor with biases (gpt-oss).
    The config has the clamp: ``swiglu_alpha`` and ``swiglu_limit``."""
    sigmoid: bool = False
    """Whether the router's scores are sigmoids, with a stored correction of the choice
    (DeepSeek-V3); otherwise softmax."""
    shared: bool = False
    """Whether there are groups of experts, a factor of the weights and shared experts."""
    typed: bool = False
    """Whether ``mlp_layer_types`` lists the layers with experts. By default, all layers except the
    first have experts."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Rules for reading the config of one ``model_type``."""

    model_type: str
    class_prefix: str
    """Start of the names of transformers' classes, such as ``Qwen3`` of ``Qwen3ForCausalLM``."""
    lm_class: str = ""
    """Class of the language model if it is not ``<class_prefix>ForCausalLM``."""
    qkv_bias: Switch = False
    o_bias: Switch = False
    mlp_bias: Switch = False
    qk_norm: Switch = False
    """Whether queries and keys have an RMSNorm over head_dim before the rotation."""
    norm_offset: bool = False
    """Whether norms multiply by 1 + weight."""
    norm_bias: bool = False
    """Whether norms subtract the mean and add a bias (LayerNorm)."""
    gated: bool = True
    """Whether the dense feed-forward part has a gate."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the root of the hidden size."""
    latent: bool = False
    """Whether keys and values come from latent vectors (MLA)."""
    partial_rotary: bool = False
    """Whether ``partial_rotary_factor`` limits the rotated dims of a head."""
    windows: Literal["none", "all", "chosen", "every other"] = "none"
    """Layers that see only the last ``sliding_window`` tokens. ``chosen``: the layers that
    ``use_sliding_window``, ``layer_types`` and ``max_window_layers`` select. ``every other``: the
    layers that ``layer_types`` selects, by default every other layer from the first on."""
    sinks: bool = False
    """Whether each query head has a trained score without a value, which joins the softmax."""
    experts: Experts | None = None
    files: str = "slurmrl.models.shapes:by_name"
    """``module:function`` that maps parameters to tensors of the files."""
    decoder: str = "slurmrl.models.decoder:Decoder"
    """``module:Class`` of the decoder; a family with a different structure has a separate file."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Mapping from a field's name in most families to its different name in this family."""
    without: frozenset[str] = frozenset()
    """Fields that this family lacks, although most families have them."""
    meanings: Mapping[tuple[str, object], object] = field(default_factory=dict)
    """Mapping from (field, value) to the meaning, for values that this family uses differently."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' defaults for fields that a ``config.json`` omits, by their usual names."""

    def class_name(self, head: Literal["lm", "value"]) -> str:
        """Return the name of transformers' class of a model with this head."""
        if head == "value":
            return f"{self.class_prefix}ForSequenceClassification"
        return self.lm_class or f"{self.class_prefix}ForCausalLM"

    def switched(self, switch: Switch, values: Mapping[str, Any]) -> bool:
        """Return whether the config ``values`` switch an optional part on."""
        return switch if isinstance(switch, bool) else bool(values[switch])


SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
QUERY_RANK = "q_lora_rank"
KEY_SIZE = "qk_head_dim"
"""Field with the size of a whole key. transformers writes it, but never reads it."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """The sizes of a latent attention block."""

    query_rank: int | None
    """Size of the latent vector of queries; None if they come from hidden states."""
    rank: int
    """Size of the latent vector of keys and values."""
    plain: int
    """Number of dims of a query or key that are not rotated."""
    rotated: int
    """Number of dims of a query or key that are rotated."""
    value: int
    """Size of a value."""
    interleaved: bool
    """Whether files have the two dims of a rotated pair side by side."""

    @property
    def key(self) -> int:
        """Size of a query or key."""
        return self.plain + self.rotated

    @property
    def head(self) -> int:
        """Size of queries, keys and values in attention, to which shorter vectors are padded."""
        return max(self.key, self.value)

    @staticmethod
    def from_hf(full: Mapping[str, Any]) -> Latent:
        """Return the sizes in a ``config.json`` object that has no `problems`."""
        query = full.get(QUERY_RANK)
        rank, plain, rotated, value = (int(full[name]) for name in SIZES)
        return Latent(
            query_rank=None if query is None else int(query),
            rank=rank,
            plain=plain,
            rotated=rotated,
            value=value,
            interleaved=bool(full.get("rope_interleave", True)),
        )


def problems(full: Mapping[str, Any]) -> list[str]:
    """Return a message for each problem of the sizes in a ``config.json`` object."""
    sizes = {name: full.get(name) for name in SIZES}
    if full.get(QUERY_RANK) is not None:
        sizes[QUERY_RANK] = full[QUERY_RANK]
    found = [
        f"{n} is {size}, must be at least 1" for n, size in sizes.items() if not (size or 0) > 0
    ]
    if found:
        return found
    rotated = int(full["qk_rope_head_dim"])
    if rotated % 2:
        found.append(f"qk_rope_head_dim {rotated} is odd; rotary positions need an even size")
    for name, size in (("head_dim", rotated), (KEY_SIZE, full["qk_nope_head_dim"] + rotated)):
        if full.get(name) not in (None, size):
            found.append(f"{name} is {full[name]!r}, but the sizes of the heads imply {size}")
    heads, kv_heads = full["num_attention_heads"], full.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        found.append(
            f"num_key_value_heads is {kv_heads}, must be num_attention_heads {heads}: latent "
            "attention has a key and a value for every head"
        )
    return found
