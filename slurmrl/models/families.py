"""The families that the built-in decoder runs, one entry each.

An entry says how a family's Hugging Face ``config.json`` is to be read: the class names, the
defaults transformers gives to missing fields, and which optional parts the layers have. A part
is True, False, or the name of the config field that switches it.

To add a family that is made of parts which exist, add one entry to ``FAMILIES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurmrl.errors import UnknownNameError
from slurmrl.registry import near

Switch = bool | str


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to read one ``model_type``."""

    model_type: str
    class_prefix: str
    """``Qwen3`` of ``Qwen3ForCausalLM``."""
    qkv_bias: Switch = False
    o_bias: Switch = False
    mlp_bias: Switch = False
    qk_norm: bool = False
    """RMSNorm over head_dim of queries and keys, before the rotation."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers assumes for fields that a ``config.json`` leaves out."""

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
QWEN_DEFAULTS: Mapping[str, Any] = {
    **COMMON_DEFAULTS,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "layer_types": None,
}

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",
            class_prefix="Llama",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            mlp_bias="mlp_bias",
            defaults={
                **COMMON_DEFAULTS,
                "max_position_embeddings": 2048,
                "attention_bias": False,
                "mlp_bias": False,
                "pretraining_tp": 1,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
        ),
        Family(
            model_type="qwen2",
            class_prefix="Qwen2",
            qkv_bias=True,
            defaults=QWEN_DEFAULTS,
        ),
        Family(
            model_type="qwen3",
            class_prefix="Qwen3",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            defaults={**QWEN_DEFAULTS, "attention_bias": False, "head_dim": 128},
        ),
    )
}


def family_of(model_type: object) -> Family:
    """The entry of a ``model_type``; UnknownNameError lists the known ones."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        hint = near(str(model_type), sorted(FAMILIES))
        raise UnknownNameError(f"model_type {model_type!r} is not a family we run; {hint}")
    return FAMILIES[model_type]
