"""What a decoder looks like, from and to Hugging Face's ``config.json``. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slurmrl.errors import UsageError
from slurmrl.models.families import Family, family_of
from slurmrl.models.rope import Rope
from slurmrl.registry import near

Head = Literal["lm", "value"]

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
COUNTS = (*REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings")
NUMBERS = (*COUNTS, "rms_norm_eps", "initializer_range", "rope_theta")
ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta")
STRUCTURAL = (
    *REQUIRED,
    *ROPE_FIELDS,
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "initializer_range",
    "max_position_embeddings",
    "tie_word_embeddings",
)
"""Fields with a place of their own in ModelConfig; all others are carried along in ``extra``."""
DESCRIPTIVE = (
    "model_type",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "id2label",
    "label2id",
    "num_labels",
)
"""Fields that are written anew at each export."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of one decoder."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Not always hidden_size / num_heads."""
    activation: str
    norm_eps: float
    initializer_range: float
    max_positions: int
    tie_embeddings: bool
    rope: Rope
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    extra: Mapping[str, Any]
    """Fields of ``config.json`` that do not shape the computation, token ids among them."""

    @staticmethod
    def from_hf(values: Mapping[str, Any], *, strict: bool = False) -> ModelConfig:
        """Read a ``config.json`` object.

        With ``strict`` (an architecture that a user wrote), unknown fields are refused.
        Raises UsageError with everything that is wrong.
        """
        family = family_of(values.get("model_type"))
        missing = [f"'{name}' is missing" for name in REQUIRED if values.get(name) is None]
        unknown = _unknown_fields(family, values) if strict else []
        malformed = _malformed(values)
        if missing or unknown or malformed:
            raise _refused(family, missing + unknown + malformed)
        null = {name for name in STRUCTURAL if name in values and values[name] is None}
        full = {**family.defaults, **{k: v for k, v in values.items() if k not in null}}
        rope, problems = Rope.from_hf(full, int(full["max_position_embeddings"]))
        config = _build(family, full, rope)
        problems += _unsupported(full) + _bad_shapes(config)
        if problems:
            raise _refused(family, problems)
        return config

    def to_hf(self, *, head: Head = "lm", dtype: str = "float32") -> dict[str, Any]:
        """The ``config.json`` object that transformers loads for weights of this ``dtype``."""
        family = family_of(self.model_type)
        task = "CausalLM" if head == "lm" else "SequenceClassification"
        values: dict[str, Any] = {
            **self.extra,
            "architectures": [f"{family.class_prefix}For{task}"],
            "model_type": self.model_type,
            "dtype": dtype,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": self.activation,
            "rms_norm_eps": self.norm_eps,
            "initializer_range": self.initializer_range,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tie_embeddings,
            "rope_parameters": self.rope.to_hf(),
        }
        if head == "value":
            values |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return dict(sorted(values.items()))


def _build(family: Family, full: Mapping[str, Any], rope: Rope) -> ModelConfig:
    heads = int(full["num_attention_heads"])
    hidden = int(full["hidden_size"])
    return ModelConfig(
        model_type=family.model_type,
        vocab_size=int(full["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(full["intermediate_size"]),
        num_layers=int(full["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(full.get("num_key_value_heads") or heads),
        head_dim=int(full.get("head_dim") or hidden // max(heads, 1)),
        activation=str(full["hidden_act"]),
        norm_eps=float(full["rms_norm_eps"]),
        initializer_range=float(full["initializer_range"]),
        max_positions=int(full["max_position_embeddings"]),
        tie_embeddings=bool(full["tie_word_embeddings"]),
        rope=rope,
        qkv_bias=family.switched(family.qkv_bias, full),
        o_bias=family.switched(family.o_bias, full),
        mlp_bias=family.switched(family.mlp_bias, full),
        qk_norm=family.qk_norm,
        extra={k: v for k, v in full.items() if k not in STRUCTURAL and k not in DESCRIPTIVE},
    )


def _refused(family: Family, problems: list[str]) -> UsageError:
    return UsageError(f"{family.model_type} config: " + "; ".join(problems))


def _unknown_fields(family: Family, values: Mapping[str, Any]) -> list[str]:
    known = sorted({*STRUCTURAL, *DESCRIPTIVE, *family.defaults})
    return [f"unknown field '{name}', {near(name, known)}" for name in values if name not in known]


def _malformed(values: Mapping[str, Any]) -> list[str]:
    """Fields that hold something else than the number they must hold (null: the default)."""
    problems = []
    for name in NUMBERS:
        value, kind = values.get(name), int if name in COUNTS else (int, float)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            rule = "a whole number" if name in COUNTS else "a number"
            problems.append(f"{name} is {value!r}, must be {rule}")
    return problems


def _unsupported(full: Mapping[str, Any]) -> list[str]:
    """Fields that ask for a computation which the decoder does not do."""
    problems = []
    if full["hidden_act"] not in ACTIVATIONS:
        problems.append(f"hidden_act '{full['hidden_act']}' is not one of {', '.join(ACTIVATIONS)}")
    if full.get("use_sliding_window"):
        problems.append("use_sliding_window: true is not supported")
    if set(full.get("layer_types") or ()) - {"full_attention"}:
        problems.append("layer_types other than full_attention are not supported")
    if full.get("partial_rotary_factor") not in (None, 1.0):
        problems.append("partial_rotary_factor other than 1 is not supported")
    if full.get("quantization_config"):
        problems.append("quantized weights are not supported")
    return problems


def _bad_shapes(config: ModelConfig) -> list[str]:
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
    }
    problems = [f"{name} is {size}, must be at least 1" for name, size in sizes.items() if size < 1]
    if config.num_heads % max(config.num_kv_heads, 1):
        problems.append(
            f"num_attention_heads {config.num_heads} is not a multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        problems.append(f"head_dim {config.head_dim} is odd; rotary positions need an even one")
    return problems
