"""Checks of a ``config.json`` for the built-in decoder. Torch-free.

Each problem is one message. Fields have the names of most families; callers have renamed the fields
of other families.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from slurmrl.fsio.documents import shown
from slurmrl.models import family_rules
from slurmrl.models.family_rules import PARTIAL, WHOLE_HEADS, Experts, Family
from slurmrl.registry import near

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
QUANTIZED = "quantization_config"
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "num_experts_per_tok",
    "sliding_window",
    "decoder_sparse_step",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "first_k_dense_replace",
    family_rules.QUERY_RANK,
    *family_rules.SIZES,
)
NUMBERS = (
    "rms_norm_eps",
    "initializer_range",
    "rope_theta",
    "original_max_position_embeddings",
    "router_aux_loss_coef",
    "routed_scaling_factor",
    "swiglu_alpha",
    "swiglu_limit",
    PARTIAL,
)
NEVER_NULL = ("num_experts_per_tok", "routed_scaling_factor", "swiglu_alpha", "swiglu_limit")
"""Fields of experts that must not be null, in addition to fields that the family names."""
LARGEST = {"num_hidden_layers": 10**5}
"""Maximum of each size that costs memory and time even if slurmrl only reads the config."""
LARGEST_SIZE = 10**9
LARGEST_NUMBER = 1e30
METHOD = "topk_method"
METHODS = ("greedy", "group_limited_greedy")
MUST_BE_OFF = ("add_cross_attention", "use_bidirectional_attention")
"""Fields of computations that the decoder does not support."""


def unknown_fields(values: Mapping[str, Any], known: Collection[str]) -> list[str]:
    names = sorted(known)
    return [f"unknown field '{name}', {near(name, names)}" for name in values if name not in known]


def malformed(family: Family, values: Mapping[str, Any]) -> list[str]:
    """Return problems of fields that must be numbers but are not. Null means the default."""
    problems = []
    experts = (family.experts.count, family.experts.inner) if family.experts else ()
    counts = {*SIZES, *experts}
    balance = ("router_aux_loss_coef",) if values.get("output_router_logits") else ()
    numbers = (*experts, *balance, *NEVER_NULL)
    never_null = {name for name in numbers if family.defaults.get(name)}
    for name in (*sorted(counts), *NUMBERS):
        value, kind = values.get(name), int if name in counts else (int, float)
        if value is None and name in values and name in never_null:
            problems.append(f"{name} is null, must be a number; leave it out for its default")
        elif value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            rule = "an integer" if name in counts else "a number"
            problems.append(f"{name} is {value!r}, must be {rule}")
        elif value is not None:
            most = LARGEST.get(name, LARGEST_SIZE) if name in counts else LARGEST_NUMBER
            if not abs(value) <= most:
                problems.append(f"{name} is {shown(value)}, must be at most {most:g}")
    return problems


def unsupported(family: Family, full: Mapping[str, Any]) -> list[str]:
    """Return problems of fields that request an unsupported computation."""
    problems = [f"{name} is not supported" for name in MUST_BE_OFF if full.get(name)]
    if full.get("is_causal") is False:
        problems.append("is_causal is false: the model would read later tokens")
    if full.get(QUANTIZED):
        problems.append(
            f"{QUANTIZED} is not supported: dequantize the model with transformers "
            "(for MXFP4: Mxfp4Config(dequantize=True)), save it, and name the result"
        )
    if full["hidden_act"] not in ACTIVATIONS:
        problems.append(f"hidden_act '{full['hidden_act']}' is not one of {', '.join(ACTIVATIONS)}")
    if full.get(PARTIAL) not in WHOLE_HEADS and not family.partial_rotary:
        problems.append(f"{PARTIAL} {full[PARTIAL]!r} is not supported, only 1")
    if family.experts is not None:
        problems += _bad_experts(family, family.experts, full)
    if family.latent:
        problems += family_rules.problems(full)
    return problems + _layer_types(family, full)


def _bad_experts(family: Family, names: Experts, full: Mapping[str, Any]) -> list[str]:
    """Return problems of the fields of layers with experts."""
    problems = []
    if full["num_experts_per_tok"] is None:  # Some families lack a default for it.
        problems.append("'num_experts_per_tok' is missing")
    if METHOD in family.defaults and full[METHOD] not in METHODS:
        problems.append(f"{METHOD} is {full[METHOD]!r}, must be {' or '.join(METHODS)}")
    types, layers = full.get("mlp_layer_types"), full["num_hidden_layers"]
    if names.typed and types is not None:
        listed = isinstance(types, list) and len(types) == layers
        if not listed or set(types) - {"dense", "sparse"}:
            problems += [f"mlp_layer_types must list dense or sparse for each of {layers} layers"]
    return problems


def _layer_types(family: Family, full: Mapping[str, Any]) -> list[str]:
    types = full.get("layer_types")
    if types is None:
        return []
    some = family.windows in ("chosen", "every other")
    allowed = ["full_attention", "sliding_attention"][: 2 if some else 1]
    if not isinstance(types, list) or set(types) - set(allowed):
        return [f"layer_types must be a list of {' or '.join(allowed)}"]
    layers = full["num_hidden_layers"]
    return [] if len(types) == layers else [f"layer_types has {len(types)} of {layers} layers"]


def bad_sizes(sizes: Mapping[str, int], *, rotary: bool) -> list[str]:
    """Return a problem for each impossible size or combination; ``sizes`` maps fields to sizes."""
    problems = [f"{name} is {size}, must be at least 1" for name, size in sizes.items() if size < 1]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    if heads % max(kv_heads, 1):
        problems.append(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if rotary and sizes["head_dim"] % 2:
        problems.append(f"head_dim {sizes['head_dim']} is odd; rotary positions need an even size")
    if not rotary and sizes["head_dim"] * heads != sizes["hidden_size"]:
        problems.append(
            f"hidden_size {sizes['hidden_size']} is not a multiple of num_attention_heads {heads}"
        )
    experts, chosen = sizes.get("number of experts"), sizes.get("num_experts_per_tok", 0)
    if experts is not None and chosen > experts:
        problems.append(f"num_experts_per_tok is {chosen}, but there are {experts} experts")
    elif experts is not None and min(sizes.values()) > 0:
        problems += _bad_groups(experts, chosen, sizes["n_group"], sizes["topk_group"])
    return problems


def _bad_groups(experts: int, chosen: int, groups: int, taken: int) -> list[str]:
    if groups == 1 == taken:
        return []
    if experts % groups or experts // groups < 2:
        return [f"n_group {groups} does not divide {experts} experts into groups of 2 or more"]
    if taken > groups:
        return [f"topk_group is {taken}, but n_group is {groups}"]
    if experts // groups * taken < chosen:
        return [
            f"num_experts_per_tok is {chosen}, but topk_group {taken} leaves only "
            f"{experts // groups * taken} experts"
        ]
    return []
