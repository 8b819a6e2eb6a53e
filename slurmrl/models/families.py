"""The families that the built-in decoder runs, one entry each. Torch-free.

An entry defines how to read a family's Hugging Face ``config.json``: the class names, the defaults
that transformers uses for missing fields, and which optional parts the layers have. A part
is True, False, or the name of the config field that switches it.

To add a family that combines existing parts, add one entry to ``FAMILIES``
(docs/models.md shows how).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slurmrl.errors import UnknownNameError
from slurmrl.registry import near

PARTIAL = "partial_rotary_factor"
WHOLE_HEADS = (None, 1)
"""Values of that field with which all dims of a head are rotated."""

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
    """Whether the router's scores are sigmoids, with a stored correction of the choice, groups of
    experts, a factor of the weights and shared experts (DeepSeek-V3); otherwise softmax."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Rules for reading the config of one ``model_type``."""

    model_type: str
    class_prefix: str
    """``Qwen3`` of ``Qwen3ForCausalLM``."""
    lm_class: str = ""
    """The class of the language model where it is not ``<class_prefix>ForCausalLM``."""
    qkv_bias: Switch = False
    o_bias: Switch = False
    mlp_bias: Switch = False
    qk_norm: Switch = False
    """RMSNorm over head_dim of queries and keys, before the rotation."""
    norm_offset: bool = False
    """Norms multiply by 1 + weight."""
    norm_bias: bool = False
    """Norms subtract the mean and add a bias (LayerNorm)."""
    gated: bool = True
    """Whether the dense feed-forward part has a gate."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the root of the hidden size."""
    latent: bool = False
    """Keys and values come from latent vectors (MLA)."""
    partial_rotary: bool = False
    """A part of each head's dims is rotated (``partial_rotary_factor``); otherwise all dims."""
    windows: Literal["none", "all", "chosen", "every other"] = "none"
    """Which layers see only the last ``sliding_window`` tokens: none, all, or those that
    ``use_sliding_window``, ``layer_types`` and ``max_window_layers`` choose. Without
    ``layer_types``, every other layer from the first one."""
    sinks: bool = False
    """Each query head has a trained score without a value, which takes part in the softmax."""
    experts: Experts | None = None
    files: str = "slurmrl.models.shapes:by_name"
    """``module:function`` that maps parameters to tensors of the files."""
    decoder: str = "slurmrl.models.decoder:Decoder"
    """``module:Class`` of the decoder; a family with another structure has a separate file."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Config fields that the family names differently: our name to its name."""
    without: frozenset[str] = frozenset()
    """Fields that this family lacks, although most families have them."""
    meanings: Mapping[tuple[str, object], object] = field(default_factory=dict)
    """Values of fields with another meaning in files: (our field, file value) to our value."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' defaults for fields that a ``config.json`` omits, by our names."""

    def class_name(self, head: Literal["lm", "value"]) -> str:
        """Return the name of transformers' class of a model with this head."""
        if head == "value":
            return f"{self.class_prefix}ForSequenceClassification"
        return self.lm_class or f"{self.class_prefix}ForCausalLM"

    def switched(self, switch: Switch, values: Mapping[str, Any]) -> bool:
        """The state of an optional part under the config ``values``."""
        return switch if isinstance(switch, bool) else bool(values[switch])


COMMON_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WITH_TOKENS: Mapping[str, Any] = {**COMMON_DEFAULTS, "bos_token_id": 1, "eos_token_id": 2}
QWEN_DEFAULTS: Mapping[str, Any] = {
    **COMMON_DEFAULTS,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
MISTRAL_DEFAULTS: Mapping[str, Any] = {
    **WITH_TOKENS,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
ROUTER_DEFAULTS: Mapping[str, Any] = {
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}

LLAMA = Family(
    model_type="llama",
    class_prefix="Llama",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    defaults={
        **WITH_TOKENS,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
    },
)
QWEN2 = Family(
    model_type="qwen2",
    class_prefix="Qwen2",
    qkv_bias=True,
    windows="chosen",
    defaults=QWEN_DEFAULTS,
)
QWEN3 = Family(
    model_type="qwen3",
    class_prefix="Qwen3",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    windows="chosen",
    defaults={**QWEN_DEFAULTS, "attention_bias": False, "head_dim": 128},
)
MISTRAL = Family(
    model_type="mistral",
    class_prefix="Mistral",
    windows="all",
    defaults=MISTRAL_DEFAULTS,
)
GEMMA = Family(
    model_type="gemma",
    class_prefix="Gemma",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    norm_offset=True,
    scaled_embedding=True,
    meanings={("hidden_act", "gelu"): "gelu_pytorch_tanh"},  # as in transformers
    defaults={
        **COMMON_DEFAULTS,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_bidirectional_attention": None,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
)
MIXTRAL = Family(
    model_type="mixtral",
    class_prefix="Mixtral",
    windows="all",
    files="slurmrl.models.shapes:experts",
    experts=Experts(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    defaults={
        **MISTRAL_DEFAULTS,
        **ROUTER_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.0,
    },
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    class_prefix="Qwen3Moe",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    windows="all",
    files="slurmrl.models.shapes:experts",
    experts=Experts(
        count="num_experts", inner="moe_intermediate_size", normalized="norm_topk_prob"
    ),
    defaults={
        **COMMON_DEFAULTS,
        **ROUTER_DEFAULTS,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
)
CORRECTED = Experts(
    count="n_routed_experts",
    inner="moe_intermediate_size",
    normalized="norm_topk_prob",
    sigmoid=True,
)
CORRECTED_DEFAULTS: Mapping[str, Any] = {
    **COMMON_DEFAULTS,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "attention_bias": False,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "output_router_logits": False,
}
GLM4_MOE = Family(
    model_type="glm4_moe",
    class_prefix="Glm4Moe",
    qkv_bias="attention_bias",
    qk_norm="use_qk_norm",
    partial_rotary=True,
    files="slurmrl.models.shapes:experts",
    experts=CORRECTED,
    fields={"num_nextn_predict_layers": "num_mtp_layers"},  # transformers accepts both names
    defaults={
        **CORRECTED_DEFAULTS,
        "use_qk_norm": False,
        PARTIAL: 0.5,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
)
SOLAR_OPEN = Family(
    model_type="solar_open",
    class_prefix="SolarOpen",
    qkv_bias="attention_bias",
    partial_rotary=True,
    files="slurmrl.models.shapes:experts",
    experts=CORRECTED,
    defaults={
        **CORRECTED_DEFAULTS,
        "rope_theta": 1e6,
        PARTIAL: 1.0,
        "head_dim": 128,
        "intermediate_size": None,  # all layers have experts
        "moe_intermediate_size": 1280,
    },
)
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    class_prefix="DeepseekV3",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    latent=True,
    files="slurmrl.models.shapes:experts",
    experts=CORRECTED,
    fields={"num_nextn_predict_layers": "num_mtp_layers"},  # transformers accepts both names
    defaults={
        **CORRECTED_DEFAULTS,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 128,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
    },
)
GPT_OSS = Family(
    model_type="gpt_oss",
    class_prefix="GptOss",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    windows="every other",
    sinks=True,
    files="slurmrl.models.shapes:fused_experts",
    experts=Experts(clamped=True),
    defaults={
        **COMMON_DEFAULTS,
        **ROUTER_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": None,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "intermediate_size": 2880,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
)
GPT2 = Family(
    model_type="gpt2",
    class_prefix="GPT2",
    lm_class="GPT2LMHeadModel",
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    norm_bias=True,
    gated=False,
    files="slurmrl.models.shapes:gpt2",
    decoder="slurmrl.models.decoder:GPT2",
    fields={
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "hidden_act": "activation_function",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    without=frozenset(("num_key_value_heads", "head_dim", "rope_parameters", "attention_dropout")),
    defaults={
        **COMMON_DEFAULTS,
        "hidden_act": "gelu_new",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1024,
        "intermediate_size": None,
        "tie_word_embeddings": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "summary_activation": None,
        "summary_proj_to_labels": True,
        "summary_first_dropout": 0.1,
    },
)

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        QWEN2,
        QWEN3,
        MISTRAL,
        GEMMA,
        MIXTRAL,
        QWEN3_MOE,
        GLM4_MOE,
        SOLAR_OPEN,
        DEEPSEEK_V3,
        GPT_OSS,
        GPT2,
    )
}
REFUSED: Mapping[str, str] = {
    "gemma2": "it caps scores and logits softly (attn_logit_softcapping, "
    "final_logit_softcapping), which packed attention kernels and the chunked log-probabilities "
    "do not do",
    "gemma3_text": "it alternates two rotations and norms around each block",
    "kimi_k2": "its layers are those of deepseek_v3, so set model_type to it "
    "(docs/models.md#latent-attention)",
    **dict.fromkeys(
        ("deepseek_v2", "glm4_moe_lite"),
        "its attention reads keys and values from latent vectors (MLA), which it does not compute",
    ),
}
"""Families that users may expect, and why the built-in decoder does not run them."""


def family_of(model_type: object) -> Family:
    """The entry of a ``model_type``. Raises UnknownNameError with the reason or the known ones."""
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    # A similar name is mostly another architecture (qwen3_5_text and qwen3_moe), not a misspelling.
    hint = REFUSED.get(str(model_type)) or near(str(model_type), sorted(FAMILIES), likeness=0.8)
    raise UnknownNameError(
        f"model_type {model_type!r} is not supported by the built-in decoder: {hint}; "
        "'implementation: hf' runs any family of transformers"
    )
