"""Names and shapes of a decoder's parameters. They equal those of the safetensors files unless
``storage.py`` maps them. Torch-free."""

from __future__ import annotations

from slurmrl.models.config import Head, ModelConfig

EMBEDDING = "model.embed_tokens.weight"
POSITIONS = "model.embed_positions.weight"
LM_HEAD = "lm_head.weight"
VALUE_HEAD = "score.weight"
Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(config: ModelConfig, head: Head) -> Shapes:
    """Shape of every parameter by name, in the decoder's order.

    A tied language-model head has no entry, because it is the embedding.
    """
    hidden = config.hidden_size
    shapes: Shapes = {EMBEDDING: (config.vocab_size, hidden)}
    if config.rope is None:
        shapes[POSITIONS] = (config.max_positions, hidden)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config, layer).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    _norm(shapes, "model.norm", config)
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


def _layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    hidden = config.hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {}
    _linear(shapes, "self_attn.q_proj", q, hidden, config.qkv_bias)
    _linear(shapes, "self_attn.k_proj", kv, hidden, config.qkv_bias)
    _linear(shapes, "self_attn.v_proj", kv, hidden, config.qkv_bias)
    _linear(shapes, "self_attn.o_proj", hidden, q, config.o_bias)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    if config.moe and layer in config.moe.layers:
        experts, inner = config.moe.experts, config.moe.inner
        shapes["mlp.gate.weight"] = (experts, hidden)
        shapes["mlp.experts.gate_proj"] = (experts, inner, hidden)
        shapes["mlp.experts.up_proj"] = (experts, inner, hidden)
        shapes["mlp.experts.down_proj"] = (experts, hidden, inner)
    else:
        inner = config.intermediate_size
        if config.family.gated:
            _linear(shapes, "mlp.gate_proj", inner, hidden, config.mlp_bias)
        _linear(shapes, "mlp.up_proj", inner, hidden, config.mlp_bias)
        _linear(shapes, "mlp.down_proj", hidden, inner, config.mlp_bias)
    _norm(shapes, "input_layernorm", config)
    _norm(shapes, "post_attention_layernorm", config)
    return shapes


def _linear(shapes: Shapes, name: str, outputs: int, inputs: int, bias: bool) -> None:
    shapes[f"{name}.weight"] = (outputs, inputs)
    if bias:
        shapes[f"{name}.bias"] = (outputs,)


def _norm(shapes: Shapes, name: str, config: ModelConfig) -> None:
    shapes[f"{name}.weight"] = (config.hidden_size,)
    if config.family.norm_bias:
        shapes[f"{name}.bias"] = (config.hidden_size,)
