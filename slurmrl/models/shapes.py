"""Names and shapes of a decoder's parameters, exactly as its safetensors files have them.
Torch-free."""

from __future__ import annotations

from slurmrl.models.config import Head, ModelConfig

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
VALUE_HEAD = "score.weight"


def parameter_shapes(config: ModelConfig, head: Head) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by name, in the decoder's order.

    A tied language-model head has no entry: it is the embedding.
    """
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if head == "value":
        shapes[VALUE_HEAD] = (1, hidden)
    elif not config.tie_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def parameter_count(config: ModelConfig, head: Head = "lm") -> int:
    """Number of parameters; tied ones count once."""
    total = 0
    for shape in parameter_shapes(config, head).values():
        size = 1
        for extent in shape:
            size *= extent
        total += size
    return total


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, out_features: int, in_features: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (out_features, in_features)
        if bias:
            shapes[f"{name}.bias"] = (out_features,)

    linear("self_attn.q_proj", q, hidden, config.qkv_bias)
    linear("self_attn.k_proj", kv, hidden, config.qkv_bias)
    linear("self_attn.v_proj", kv, hidden, config.qkv_bias)
    linear("self_attn.o_proj", hidden, q, config.o_bias)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    linear("mlp.gate_proj", inner, hidden, config.mlp_bias)
    linear("mlp.up_proj", inner, hidden, config.mlp_bias)
    linear("mlp.down_proj", hidden, inner, config.mlp_bias)
    shapes["input_layernorm.weight"] = (hidden,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    return shapes
