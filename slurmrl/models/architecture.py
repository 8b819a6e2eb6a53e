"""The architecture of a decoder, from and to Hugging Face's ``config.json``. Torch-free.

Rotary settings have the ``rope_parameters`` form of transformers 5, or the older form with
``rope_theta`` and ``rope_scaling``.

"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from slurmrl.errors import UsageError
from slurmrl.models.config_checks import bad_sizes, malformed, unknown_fields, unsupported
from slurmrl.models.families import family_of
from slurmrl.models.family_rules import KEY_SIZE, PARTIAL, WHOLE_HEADS, Family, Latent

Head = Literal["lm", "value"]

ROPE_KINDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # kind: required fields, optional fields
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor",),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
ORIGINAL_LENGTH = "original_max_position_embeddings"
WITH_ORIGINAL_LENGTH = ("llama3", "yarn")
REFUSED_ROPES: Mapping[str, str] = {
    "longrope": "its angles depend on the length of a sequence, so cached keys would have to be "
    "rotated again as the sequence grows",
}

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta", ORIGINAL_LENGTH)
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
"""Fields with a counterpart in `ModelConfig`, which keeps all other fields in ``extra``."""
DESCRIPTIVE = (
    "model_type",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "id2label",
    "label2id",
    "num_labels",
    PARTIAL,
)
"""Fields that each export rewrites or omits."""
ALIASES = {
    "num_local_experts": "num_experts",
    "num_experts": "num_local_experts",
    "n_routed_experts": "num_local_experts",
}
"""Mapping from each field with the number of experts to an alias that transformers accepts."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """One kind of rotary scaling and its parameters.

    ``dynamic`` is the unscaled rotation up to ``max_position_embeddings``. Longer sequences are
    rejected, because transformers' angles would depend on the longest sequence of a batch.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_length: int = 0
    """Context length before the extension (llama3, yarn)."""
    partial: float | None = None
    """Share of each head's dims that is rotated, from the first dim on; None for a family that
    always rotates all dims."""
    options: Mapping[str, Any]
    """Other fields of this kind of scaling, as in the file."""

    @staticmethod
    def from_hf(
        values: Mapping[str, Any], max_positions: int, *, partial: bool = False
    ) -> tuple[Rope, list[str]]:
        """Read the rotary fields of a ``config.json`` as transformers does. Also return problems.

        With ``partial``, a part of each head's dims may be rotated. The older ``rope_scaling``
        overrides ``rope_parameters``. An original length outside these objects overrides an
        original length inside them.
        """
        stated = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
        kind = stated.pop("rope_type", None) or stated.pop("type", None) or "default"
        stated.pop("type", None)
        share = stated.pop(PARTIAL, None)
        if not partial and share not in WHOLE_HEADS:
            return Rope(options={}), [f"{PARTIAL} {share!r} is not supported, only 1"]
        share = share or values.get(PARTIAL)
        if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
            return Rope(options={}), [f"{PARTIAL} is {share!r}, must be above 0 and at most 1"]
        theta = stated.pop("rope_theta", None) or values.get("rope_theta") or 10000.0
        if kind not in ROPE_KINDS:
            reason = REFUSED_ROPES.get(kind) or f"it is not one of {', '.join(ROPE_KINDS)}"
            return Rope(options={}), [f"rope_type '{kind}' is not supported: {reason}"]
        problems = _field_problems(kind, {**stated, "rope_theta": theta})
        if problems:
            return Rope(options={}), problems
        original = 0
        if kind in WITH_ORIGINAL_LENGTH:
            inside = stated.pop(ORIGINAL_LENGTH, None)
            original = values.get(ORIGINAL_LENGTH) or inside or max_positions
        factor = stated.pop("factor", None) or 1.0
        rope = Rope(
            kind=kind,
            theta=float(theta),
            factor=float(factor),
            original_length=int(original),
            partial=float(share) if partial and share is not None else None,
            options=stated,
        )
        return rope, []

    def growth(self, weight: float = 1.0) -> float:
        """Return YaRN's temperature for extended contexts (Peng et al. 2023, section 3.4)."""
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0

    @property
    def score_factor(self) -> float:
        """Factor of queries and of keys in latent attention (``mscale_all_dim``)."""
        return self.growth(float(self.options.get("mscale_all_dim") or 0.0))

    def to_hf(self) -> dict[str, Any]:
        """Return the ``rope_parameters`` object of a ``config.json``."""
        values: dict[str, Any] = {"rope_theta": self.theta, "rope_type": self.kind}
        if "factor" in ROPE_KINDS[self.kind][0]:
            values["factor"] = self.factor
        if self.original_length:
            values[ORIGINAL_LENGTH] = self.original_length
        if self.partial is not None:
            values[PARTIAL] = self.partial
        return {**values, **self.options}


def _field_problems(kind: str, stated: Mapping[str, Any]) -> list[str]:
    required, optional = ROPE_KINDS[kind]
    missing = [name for name in required if stated.get(name) is None]
    allowed = {*required, *optional, "rope_theta", ORIGINAL_LENGTH}
    unknown = sorted(set(stated) - allowed)
    known = ", ".join(sorted(allowed))
    return [
        *(
            f"rope field '{name}' is {value!r}, must be a number"
            for name, value in stated.items()
            if name in allowed and not isinstance(value, int | float | None)
        ),
        *(f"rope_type '{kind}' needs the field '{name}'" for name in missing),
        *(f"rope_type '{kind}' has no field '{name}'; it has: {known}" for name in unknown),
    ]


class Clamp(NamedTuple):
    """Parameters of clamped experts, whose gated product is g sigmoid(alpha g) (u + 1).

    The gate g is clamped to at most ``limit``, and the other factor u to [-limit, limit].
    """

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class MoE:
    """The mixture-of-experts layers of a decoder."""

    experts: int
    per_token: int
    inner: int
    """Inner size of one expert."""
    normalized: bool
    """Whether the weights of a token's experts are scaled to a sum of 1."""
    layers: frozenset[int]
    """The layers that have experts; the others are dense."""
    balance: float
    """Coefficient of the load-balancing loss in training; 0 for none. As in transformers, the loss
    applies only with ``output_router_logits``."""
    corrected: bool = False
    """Whether the router's scores are sigmoids. A stored correction changes the choice."""
    exact: bool = False
    """Whether the router's logits are float32 whatever the model's dtype."""
    groups: int = 1
    """Number of groups of consecutive experts. A token uses the best ``chosen_groups`` groups."""
    chosen_groups: int = 1
    scale: float = 1.0
    """Factor of the weights of a token's experts."""
    clamp: Clamp | None = None
    """Clamp of the experts' gates. With a clamp, routers and experts also have biases."""
    shared: int = 0
    """Inner size of the shared experts, which process every token; 0 for none."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of a decoder."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Size of a head, which may differ from hidden_size / num_heads. For latent attention, the size
    of queries, keys and values in attention."""
    activation: str
    norm_eps: float
    initializer_range: float
    max_positions: int
    tie_embeddings: bool
    rope: Rope | None
    """Rotary settings; None if positions are learned embeddings."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """Number of tokens that each layer attends to, the token itself included; None for all."""
    moe: MoE | None
    latent: Latent | None = None
    """Sizes of latent attention, if the layers have it."""
    extra: Mapping[str, Any]
    """Fields of ``config.json`` without a counterpart in this class, such as token ids."""

    @property
    def family(self) -> Family:
        return family_of(self.model_type)

    @property
    def rotary_dims(self) -> int:
        """Number of a head's dims that are rotated."""
        if self.latent is not None:
            return self.latent.rotated
        share = self.rope.partial if self.rope is not None else None
        return self.head_dim if share is None else int(self.head_dim * share)

    @property
    def score_scale(self) -> float:
        """Factor of the scores of attention."""
        if self.latent is None or self.rope is None:
            return float(self.head_dim**-0.5)
        return float(self.latent.key**-0.5) * self.rope.score_factor**2

    @property
    def position_limit(self) -> int | None:
        """Maximum number of tokens of a sequence; None for no limit."""
        unlimited = self.rope is not None and self.rope.kind != "dynamic"
        return None if unlimited else self.max_positions

    def check_length(self, tokens: int) -> None:
        """Raise UsageError if a sequence has more tokens than the model has positions."""
        limit = self.position_limit
        if limit is not None and tokens > limit:
            raise UsageError(
                f"a sequence of {tokens} tokens is too long for this {self.model_type} model: it "
                f"has positions for {limit} tokens only (max_position_embeddings)"
            )

    @staticmethod
    def from_hf(values: Mapping[str, Any], *, strict: bool = False) -> ModelConfig:
        """Return the architecture of a ``config.json`` object.

        With ``strict``, for an architecture that a user wrote, unknown fields are rejected.
        Raises UsageError with all problems.
        """
        family = family_of(values.get("model_type"))
        values = _translated(family, values)
        required = [name for name in REQUIRED if name not in family.defaults]
        missing = [f"'{name}' is missing" for name in required if values.get(name) is None]
        known = _fields(family) | family.defaults.keys()
        unknown = unknown_fields(values, known) if strict else []
        wrong = malformed(family, values)
        if missing or unknown or wrong:
            raise _refused(family, missing + unknown + wrong)
        full = _full(family, values)
        rope, problems = _rope(family, full)
        problems += unsupported(family, full)
        if problems:
            raise _refused(family, problems)
        config = _build(family, full, rope)
        problems = bad_sizes(_sizes(config), rotary=rope is not None)
        partial = rope is not None and rope.partial is not None
        if partial and (config.rotary_dims < 2 or config.rotary_dims % 2):
            problems.append(f"{PARTIAL} rotates {config.rotary_dims} dims of a head, must be even")
        if config.moe and config.moe.shared < 0:
            problems.append("n_shared_experts is negative")
        if config.moe and config.moe.clamp and config.moe.clamp.limit <= 0:
            problems.append(f"swiglu_limit is {config.moe.clamp.limit:g}, must be above 0")
        if problems:
            raise _refused(family, problems)
        return config

    def to_hf(self, *, head: Head = "lm", dtype: str = "float32") -> dict[str, Any]:
        """Return the ``config.json`` object with which transformers loads weights of ``dtype``."""
        family = self.family
        values: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim if self.latent is None else self.latent.rotated,
            "hidden_act": self.activation,
            "rms_norm_eps": self.norm_eps,
            "initializer_range": self.initializer_range,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tie_embeddings,
            "rope_parameters": self.rope.to_hf() if self.rope else None,
        }
        described: dict[str, Any] = {
            "architectures": [family.class_name(head)],
            "model_type": self.model_type,
            "dtype": dtype,
        }
        if head == "value":
            described |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        theirs = {
            family.fields.get(name, name): value
            for name, value in values.items()
            if name not in family.without
        }
        return dict(sorted({**self.extra, **theirs, **described}.items()))


def _fields(family: Family) -> set[str]:
    """Return the fields of a family's ``config.json`` that are not kept in ``extra``."""
    computed = {KEY_SIZE} if family.latent else set()
    return ({*STRUCTURAL, *DESCRIPTIVE} | computed) - family.without


def _translated(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """Give fields the names of most families, and replace special values by their meanings."""
    ours = {theirs: name for name, theirs in family.fields.items()}
    if family.experts:
        ours[ALIASES[family.experts.count]] = family.experts.count
    named = {ours.get(name, name): value for name, value in values.items()}
    for (name, written), meant in family.meanings.items():
        if named.get(name) == written:
            named[name] = meant
    return named


def _full(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """Add the family's defaults for missing and null fields.

    A null number of key and value heads is kept; it means as many as query heads.
    """
    null = {name for name in STRUCTURAL if values.get(name) is None} - {"num_key_value_heads"}
    return {**family.defaults, **{k: v for k, v in values.items() if k not in null}}


def _rope(family: Family, full: Mapping[str, Any]) -> tuple[Rope | None, list[str]]:
    if "rope_parameters" in family.without:
        return None, []
    positions = int(full["max_position_embeddings"])
    return Rope.from_hf(full, positions, partial=family.partial_rotary)


def _build(family: Family, full: Mapping[str, Any], rope: Rope | None) -> ModelConfig:
    heads = int(full["num_attention_heads"])
    hidden = int(full["hidden_size"])
    sized = {} if "head_dim" in family.without else full
    layers = int(full["num_hidden_layers"])
    latent = Latent.from_hf(full) if family.latent else None
    head_dim = int(sized.get("head_dim") or hidden // max(heads, 1))
    return ModelConfig(
        model_type=family.model_type,
        vocab_size=int(full["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(full["intermediate_size"] or 4 * hidden),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(sized.get("num_key_value_heads") or heads),
        head_dim=head_dim if latent is None else latent.head,
        activation=str(full["hidden_act"]),
        norm_eps=float(full["rms_norm_eps"]),
        initializer_range=float(full["initializer_range"]),
        max_positions=int(full["max_position_embeddings"]),
        tie_embeddings=bool(full["tie_word_embeddings"]),
        rope=rope,
        qkv_bias=family.switched(family.qkv_bias, full),
        o_bias=family.switched(family.o_bias, full),
        mlp_bias=family.switched(family.mlp_bias, full),
        qk_norm=family.switched(family.qk_norm, full),
        windows=_windows(family, full, layers),
        moe=_moe(family, full, layers),
        latent=latent,
        extra=_extra(family, full),
    )


def _windows(family: Family, full: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    off = "use_sliding_window" in family.defaults and not full["use_sliding_window"]
    window = None if off else full.get("sliding_window")
    if family.windows == "none" or window is None:
        return (None,) * layers
    if family.windows == "all":
        return (window,) * layers
    types = full.get("layer_types")
    if types is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if family.windows == "every other":
        return tuple(None if layer % 2 else window for layer in range(layers))
    first = int(full["max_window_layers"])
    return tuple(window if layer >= first else None for layer in range(layers))


def _moe(family: Family, full: Mapping[str, Any], layers: int) -> MoE | None:
    names = family.experts
    if names is None:
        return None
    step, dense = full.get("decoder_sparse_step") or 1, full.get("mlp_only_layers") or ()
    first, inner = int(full.get("first_k_dense_replace") or 0), int(full[names.inner])
    if names.typed:  # transformers then ignores first_k_dense_replace.
        types, first = full.get("mlp_layer_types") or ["dense"], 0
        dense = [n for n, kind in enumerate(types) if kind == "dense"]
    sparse = (n for n in range(first, layers) if n not in dense and (n + 1) % step == 0)
    balanced = full.get("output_router_logits") and not names.shared
    more: dict[str, Any] = {}
    if names.clamped:
        more = {"clamp": Clamp(float(full["swiglu_alpha"]), float(full["swiglu_limit"]))}
    if names.shared:
        grouped = names.sigmoid or full["topk_method"] != "greedy"
        more = {
            "corrected": names.sigmoid,
            "exact": True,
            "groups": int(full["n_group"] or 1) if grouped else 1,
            "chosen_groups": int(full["topk_group"] or 1) if grouped else 1,
            "scale": float(full["routed_scaling_factor"]),
            "shared": inner * int(full["n_shared_experts"] or 0),
        }
    return MoE(
        experts=int(full[names.count]),
        per_token=int(full["num_experts_per_tok"]),
        inner=inner,
        normalized=family.switched(names.normalized, full),
        layers=frozenset(sparse),
        balance=float(full["router_aux_loss_coef"]) if balanced else 0.0,
        **more,
    )


def _extra(family: Family, full: Mapping[str, Any]) -> dict[str, Any]:
    placed = _fields(family) | family.without
    return {name: value for name, value in full.items() if name not in placed}


def _sizes(config: ModelConfig) -> dict[str, int]:
    """Return a mapping from fields to sizes that must be at least 1."""
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim if config.latent is None else config.latent.rotated,
        "max_position_embeddings": config.max_positions,
    }
    if config.moe:
        sizes["number of experts"] = config.moe.experts
        sizes["num_experts_per_tok"] = config.moe.per_token
        sizes["inner size of the experts"] = config.moe.inner
        sizes |= {"n_group": config.moe.groups, "topk_group": config.moe.chosen_groups}
    windows = [window for window in config.windows if window is not None]
    return {**sizes, "sliding_window": min(windows)} if windows else sizes


def _refused(family: Family, problems: list[str]) -> UsageError:
    return UsageError(f"{family.model_type} config: " + "; ".join(problems))
