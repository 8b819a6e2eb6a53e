"""The families that the built-in decoder runs, one entry each. Torch-free.

An entry defines how to read a family's Hugging Face ``config.json``: the class names, the defaults
that transformers uses for missing fields, and which optional parts the layers have. A part is True,
False, or the name of the config field that switches the part on.

To add a family that combines existing parts, add one entry to ``FAMILIES``
(docs/models.md shows how).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from slurmrl.errors import UnknownNameError
from slurmrl.models.family_rules import PARTIAL, Experts, Family
from slurmrl.registry import near

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
    shared=True,
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
        "intermediate_size": None,  # All layers have experts.
        "moe_intermediate_size": 1280,
    },
)
LATENT_DEFAULTS: Mapping[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
INTERLEAVED: Mapping[str, Any] = {
    **LATENT_DEFAULTS,
    "rope_interleave": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pretraining_tp": 1,
}
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
        **INTERLEAVED,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 128,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
    },
)
GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    class_prefix="Glm4MoeLite",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    latent=True,
    files="slurmrl.models.shapes:experts",
    experts=replace(CORRECTED, typed=True),
    defaults={
        **CORRECTED_DEFAULTS,
        **INTERLEAVED,
        "max_position_embeddings": 202752,
        "num_key_value_heads": 20,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "mlp_layer_types": None,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
)
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    class_prefix="DeepseekV2",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    latent=True,
    files="slurmrl.models.shapes:experts",
    experts=replace(CORRECTED, normalized=False, sigmoid=False),
    defaults={
        **LATENT_DEFAULTS,
        **WITH_TOKENS,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "first_k_dense_replace": 0,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,  # transformers does not read this field.
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
        "output_router_logits": False,
        "routed_scaling_factor": 1.0,
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
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        GLM4_MOE_LITE,
        GPT_OSS,
        GPT2,
    )
}
REFUSED: Mapping[str, str] = {
    "gemma2": "it caps scores and logits softly (attn_logit_softcapping, "
    "final_logit_softcapping), which packed attention kernels and the chunked log-probabilities "
    "do not do",
    "gemma3_text": "it alternates two rotations and norms around each block",
    "kimi_k2": "it has the layers of deepseek_v3, so set model_type to deepseek_v3 "
    "(docs/models.md#latent-attention)",
}
"""Families that users may expect, with the reason why the built-in decoder does not run them."""


def family_of(model_type: object) -> Family:
    """Return the entry of a ``model_type``. Raises UnknownNameError with the reason or a hint."""
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    # A similar name often belongs to another architecture (qwen3_5_text, qwen3_moe), so the hint
    # needs a close match.
    hint = REFUSED.get(str(model_type)) or near(str(model_type), sorted(FAMILIES), likeness=0.8)
    raise UnknownNameError(
        f"model_type {model_type!r} is not supported by the built-in decoder: {hint}; "
        "'implementation: hf' runs any family of transformers"
    )


PICTURE_FAMILIES: Final = frozenset(
    (
        *("gemma3", "gemma4", "glm46v", "glm4v", "glm4v_moe", "internvl", "llava"),
        *("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
    )
)
"""Families that join the images of several prompts along dim 0 of each argument."""
VIDEO_FAMILIES: Final = frozenset(
    ("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
)
"""Members of `PICTURE_FAMILIES` that also read videos."""
PATCH: Final = {"patch_size": 14, "temporal_patch_size": 2, "in_channels": 3}
"""Sizes of Qwen2.5-VL's patches. SGLang mistakes other patches for hidden states of images."""
STRAY: Final = 0
"""Token that the model reads in place of a placeholder without an image."""
TOKEN_FIELDS: Final = ("image_token_id", "image_token_index")
"""Fields of a ``config.json`` object, one of which has the token id of image placeholders."""
VIDEO_FIELD: Final = "video_token_id"
"""Field with the token id of video placeholders."""
SERVED: Final[Mapping[str, tuple[str, ...]]] = {
    "sglang": ("qwen2_5_vl", "qwen3_vl"),
    "vllm": ("qwen2_5_vl", "qwen3_vl"),
}
"""Families for which servers get images. For other families, requests to a server have not been
compared with training."""

PIXTRAL: Final = "pixtral"
"""Encoder whose processor pads all images of a batch to the size of the largest image."""

WITHOUT_ENCODER: Final = frozenset(("qwen3_5", "qwen3_5_moe"))
"""Members of `PICTURE_FAMILIES` that transformers also runs without the image encoder."""


def served_refusal(values: Mapping[str, Any], server: str) -> str:
    """Return why a server gets no images for the model of a ``config.json``; "" if it gets them."""
    family, known = values.get("model_type"), SERVED[server]
    if family in known:
        tower = values.get("vision_config")
        given = tower if isinstance(tower, Mapping) else {}
        odd = any(given.get(name, size) != size for name, size in PATCH.items())
        if odd and (server, family) == ("sglang", "qwen2_5_vl"):
            sizes = ", ".join(f"{name} {size}" for name, size in PATCH.items())
            return f"sglang servers read images of {family} models only with {sizes}"
        if not any(name in values for name in TOKEN_FIELDS):
            return f"{server} servers get images only if the model's config sets {TOKEN_FIELDS[0]}"
        return ""
    names = ", ".join(known)
    return f"{server} servers get no images for {family} models; allowed families: {names}"


def video_refusal(values: Mapping[str, Any]) -> str:
    """Return why the model of a ``config.json`` object cannot read videos; "" if it can."""
    if (family := values.get("model_type")) in VIDEO_FAMILIES:
        return ""
    known = ", ".join(sorted(VIDEO_FAMILIES))
    return f"videos are not possible for {family} models; allowed families: {known}"


def picture_refusal(values: Mapping[str, Any]) -> str:
    """Return why the model of a ``config.json`` cannot read images in slurmrl; "" if it can."""
    family = values.get("model_type")
    tower = values.get("vision_config")
    if family == "llava" and isinstance(tower, Mapping) and tower.get("model_type") == PIXTRAL:
        return f"images are not possible for {family} models with a {PIXTRAL} encoder"
    if family in PICTURE_FAMILIES:
        return ""
    known = ", ".join(sorted(PICTURE_FAMILIES))
    return f"images are not possible for {family} models; allowed families: {known}"
