"""The architecture of a model that transformers runs: its unchanged ``config.json``. Torch-free.

The module also returns the length up to which a sequence's results do not depend on its batch.
Rotations of type ``longrope`` change their factors for a whole batch if one sequence exceeds the
original length. ``dynamic`` changes its base for sequences longer than ``max_position_embeddings``.
Position tables have no rows for longer sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from slurmrl.config.schema.roles import VISION
from slurmrl.errors import UsageError
from slurmrl.models.architecture import Head
from slurmrl.tensors.checkpoint.tensors import TensorSlice
from slurmrl.tensors.layout import Index, TensorSpec

MODULE = "inner."
"""Prefix of parameter names; the name in transformers follows."""
TABLE: Final = "table"
"""Kind of a length limit that comes from a position table."""
TABLE_FIELDS: Final = ("max_position_embeddings", "n_positions", "max_seq_len")
BY_COLUMN: Final = "attn_temperature_tuning"
"""Field of configs (Llama 4) with which layers scale queries by the column of a token in its row,
from column ``floor_scale`` on. A short trial does not show the scaling."""
SCALED_FROM: Final = "floor_scale"
KEPT: Final = "keep_window_size"
"""Field of configs (Doge) with the number of keys that layers choose, even from later tokens."""
BY_BLOCK: Final = "compress"
"""Part of the names of config fields with which attention compresses blocks of columns. A trial
shorter than a block does not show the compression."""
# fmt: off
TENSOR_FAMILIES: Final = frozenset((
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere",
    "cohere2", "cohere2_moe", "cohere_compass_text", "cwm", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "dots1", "dots3_note_text", "ernie4_5", "ernie4_5_moe", "exaone4",
    "exaone_moe", "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "gemma4_text",
    "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_neox",
    "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid",
    "granitemoeshared", "helium", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3",
    "iquestcoder", "jais2", "jamba", "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "llama",
    "mellum", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text",
    "ministral", "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "nemotron_h", "olmo",
    "olmo2", "olmo3", "olmo_hybrid", "olmoe", "phi", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3",
    "solar_open", "starcoder2", "vaultgemma", "youtu", "zaya",
))
# fmt: on
"""Families whose models tensor ranks can share by the plans of transformers."""
# fmt: off
WHOLE_ATTENTION: Final = frozenset((
    "afmoe", "axk1", "bailing_hybrid", "deepseek_v3", "flex_olmo", "flint", "gpt_oss", "granitemoe",
    "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "jamba", "kimi_linear", "lfm2_moe",
    "minimax_m2", "minimax_m3_vl_text", "nemotron_h", "olmo2", "olmo3", "olmo_hybrid", "olmoe",
    "phimoe", "youtu", "zaya",
))
# fmt: on
"""Members of `TENSOR_FAMILIES` whose plans split no attention: each tensor rank has all heads."""
DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "deepseek_v4": {"compress_rates": True},
    "doge": {KEPT: 2048},
    "llama4_text": {BY_COLUMN: True, SCALED_FROM: 8192},
    "qwen4_exp_text": {"indexer_compress_ratio": True},
}
"""Values that transformers uses if a config omits these fields; True means any set value."""
WITH_TABLE: Final = frozenset(
    (
        "biogpt",
        "codegen",
        "ctrl",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gptj",
        "mpt",
        "openai-gpt",
        "opt",
    )
)
"""Families of language models whose positions or masks come from a table. (For other families,
`hf_loading.count_positions` finds the table after loading.)"""


@dataclass(frozen=True, kw_only=True)
class HFConfig:
    """The config of a model for ``implementation: hf``.

    Only building the model shows whether transformers supports the family.
    """

    model_type: str
    values: Mapping[str, Any]
    positions: int | None = None
    """Size of the loaded model's position table; None without one."""
    embedding: str = ""
    """Name of the token embedding in files. `hf_files.complete` sets it."""

    @staticmethod
    def from_hf(values: Mapping[str, Any], *, strict: bool = False) -> HFConfig:
        """Return the config of a ``config.json`` object.

        Raises UsageError if the object lacks the model type, requests an unsupported loss or
        describes quantized weights.
        """
        model_type = values.get("model_type")
        if not isinstance(model_type, str):
            raise UsageError(
                f"'model_type' is {model_type!r}, must be a model type of transformers"
            )
        if values.get("output_router_logits") and values.get("router_aux_loss_coef") != 0:
            raise UsageError(
                "implementation hf does not compute the load-balancing loss of "
                "output_router_logits: set that to false, or use the built-in decoder"
            )
        if any(part.get("quantization_config") for part in (values, *_text_configs(values))):
            raise UsageError(
                "'quantization_config' is set, but only weights that are not quantized are trained "
                "and moved; dequantize the model with transformers, save it, and name the result"
            )
        return HFConfig(model_type=model_type, values=dict(values))

    @property
    def tie_embeddings(self) -> bool:
        """Whether the output layer is the embedding; only for a config with this field."""
        return self.values["tie_word_embeddings"] is True

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding; only for a config from `hf_files.complete`."""
        size: int = self.values["vocab_size"]
        return size

    def check_length(self, tokens: int) -> None:
        """Raise UsageError if the model does not support a sequence of this length.

        Also raise UsageError if the sequence's results would depend on the rest of its batch.
        """
        limits = [length_limit(self.values), self.positions and LengthLimit(self.positions, TABLE)]
        limit = min((limit for limit in limits if limit), default=None)
        if limit is not None and tokens > limit.tokens:
            raise UsageError(
                f"a sequence of {tokens} tokens is too long for this {self.model_type} model: "
                f"{limit.reason}"
            )

    def to_hf(self, *, head: Head = "lm", dtype: str = "float32") -> dict[str, Any]:
        """Return the ``config.json`` object of an export."""
        values = {**self.values, "dtype": dtype}
        values.pop(VISION, None)
        if head == "value":
            values |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
            values.pop("architectures", None)  # The field names the class of the language model.
        return dict(sorted(values.items()))


def stored(name: str, shape: Index) -> tuple[TensorSlice, ...]:
    """Return the slice that stores a parameter of merged weights: the tensor of the same name."""
    return (TensorSlice(name.removeprefix(MODULE)),)


def compressing_field(values: Mapping[str, Any]) -> str | None:
    """Return a field that makes attention read blocks of columns; None if there is none.

    Padding on the left would shift the blocks. ``values`` is a ``config.json`` object.
    """
    fields = [item for part in _parts(values) for item in part.items()]
    return next((name for name, value in fields if BY_BLOCK in name and value), None)


def cache_refusal(values: Mapping[str, Any]) -> str:
    """Return why the config excludes generation with transformers' cache; "" if it does not."""
    field = compressing_field(values)
    if field is None:
        return ""
    kind = values["model_type"]
    return (
        f"{kind} models cannot generate with implementation hf: their attention compresses blocks "
        f"of columns ({field}), so completions would depend on padding; allowed: generation by a "
        "server (rollout.backend sglang:dN or vllm:dN)"
    )


@dataclass(frozen=True)
class FileForm:
    """The layout of a model's files."""

    values: Mapping[str, Any]
    """The ``config.json`` object with the defaults of the installed version of transformers. The
    object describes the model that transformers runs, which is only the language model of some
    families."""
    architecture: str
    """Name of the model's class."""
    slices: Mapping[str, tuple[TensorSlice, ...]]
    """Slices of the files' tensors that store each parameter or constant."""
    vocab_size: int
    """Number of rows of the embedding."""
    tied: bool
    """Whether the output layer is the embedding."""
    embedding: str
    """Name of the embedding in files."""

    def storage(self, name: str, shape: Index) -> tuple[TensorSlice, ...]:
        """Return the slices that store a parameter (a `Storage`)."""
        return self.slices[name]


class LengthLimit(NamedTuple):
    """Maximum number of tokens of a sequence, and the reason."""

    tokens: int
    kind: str
    """Cause of the limit: `TABLE`, `BY_COLUMN`, `KEPT` or a ``rope_type``."""

    @property
    def silent(self) -> bool:
        """Whether transformers processes sequences above the limit without an error."""
        return self.kind != TABLE

    @property
    def reason(self) -> str:
        """Reason for the limit, as the end of a message."""
        if self.kind == TABLE:
            return f"the model has positions for {self.tokens} tokens only"
        if self.kind == BY_COLUMN:
            return (
                f"with {BY_COLUMN} the model scales queries by their column in the batch after "
                f"{self.tokens} columns ({SCALED_FROM} - 1), so completions would depend on "
                "padding; lower the limits of prompts and rollout.max_new_tokens, or generate "
                "with a server (rollout.backend sglang:dN or vllm:dN)"
            )
        cause = KEPT if self.kind == KEPT else f"rope_type '{self.kind}'"
        return (
            f"with {cause} log-probabilities depend on other sequences of the batch "
            f"once a sequence (prompt and completion) has more than {self.tokens} tokens"
        )


def length_limit(values: Mapping[str, Any]) -> LengthLimit | None:
    """Return the length limit of the model that a ``config.json`` object describes.

    Return None if there is no limit, or if the number is a default of transformers. Rotations may
    differ by the type of the layer, and may be in the object's config of the text model.
    """
    limits = [limit for part in _parts(values) for limit in (*_ropes(part), *_tables(part))]
    return min(limits, default=None)


def generation_limit(values: Mapping[str, Any]) -> LengthLimit | None:
    """Return the maximum number of columns at which padding does not change completions.

    Return None if there is no limit.
    """
    limits = [
        LengthLimit(int(part[SCALED_FROM]) - 1, BY_COLUMN)
        for part in _parts(values)
        if part.get(BY_COLUMN) and part.get(SCALED_FROM)
    ]
    return min(limits, default=None)


def tensor_refusal(values: Mapping[str, Any]) -> str:
    """Return why tensor ranks cannot share models of a family; "" if they can."""
    family = values.get("model_type")
    if family in TENSOR_FAMILIES:
        return ""
    known = ", ".join(sorted(TENSOR_FAMILIES))
    return (
        f"'t' is not possible for {family} models with implementation hf, because transformers "
        f"has no tensor-parallel plan for them that slurmrl supports; allowed families: {known}"
    )


def constants_refusal(family: str, constants: Mapping[str, TensorSpec]) -> str:
    """Return why a checkpoint of a trained model cannot store its constants; "" if it can."""
    odd = sorted(name for name, spec in constants.items() if spec.dtype not in ("float32", "int64"))
    if not odd:
        return ""
    dtype = constants[odd[0]].dtype
    return f"{family} models cannot be trained here: {odd[0]} is {dtype}, not float32 or int64"


def _parts(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the config and the configs of text models within it, with known defaults."""
    parts = (values, *_text_configs(values))
    return [{**DEFAULTS.get(str(part.get("model_type")), {}), **part} for part in parts]


def _text_configs(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the configs of the text models within a multimodal config."""
    return [
        part
        for name, part in values.items()
        if isinstance(part, Mapping) and name.endswith(("_config", "decoder"))
        if not any(other in name for other in ("vision", "audio", "quantization"))
    ]


def _tables(values: Mapping[str, Any]) -> list[LengthLimit]:
    if values.get(KEPT):
        return [LengthLimit(int(values[KEPT]), KEPT)]
    if values.get("model_type") not in WITH_TABLE:
        return []
    sizes = [values[field] for field in TABLE_FIELDS if isinstance(values.get(field), int)]
    return [LengthLimit(size, TABLE) for size in sizes]


def _ropes(values: Mapping[str, Any]) -> list[LengthLimit]:
    """Return the limits of the rotations: one for all layers, or one for each layer type."""
    stated = values.get("rope_scaling") or values.get("rope_parameters")
    common = [stated] if isinstance(stated, Mapping) else []
    by_layer = [rope for ropes in common for rope in ropes.values() if isinstance(rope, Mapping)]
    return [
        LengthLimit(tokens, kind)
        for rope in (*common, *by_layer)
        if (kind := _kind(rope)) and (tokens := _original_length(values, rope, kind))
    ]


def _kind(rope: Mapping[str, Any]) -> str | None:
    """Return ``longrope`` or ``dynamic``; None if the rotation does not depend on lengths."""
    kind = str(rope.get("rope_type") or rope.get("type") or "")
    if "dynamic" in kind:
        return "dynamic"
    # Older Phi files call this rotation su, or even yarn.
    return "longrope" if kind in ("longrope", "su") or "long_factor" in rope else None


def _original_length(values: Mapping[str, Any], rope: Mapping[str, Any], kind: str) -> int | None:
    original = "original_max_position_embeddings"
    stated = [values.get("max_position_embeddings")]
    if kind == "longrope":
        stated = [values.get(original), rope.get(original), *stated]
    return next((length for length in stated if isinstance(length, int)), None)
