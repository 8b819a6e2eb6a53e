"""Models on servers: splits, narrower types of weights and caches, FP8, and vLLM on CPUs.

Weight files have FP8 matrices in the format of DeepSeek V3, which SGLang and vLLM read: a matrix of
float8_e4m3fn, and a float32 factor for each block of 128 x 128 elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from slurmrl.config.allocation import Allocation
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.schema import Config
from slurmrl.config.schema.roles import TARGETS
from slurmrl.plan.engine_rules import LEAST_HEAD, last_value
from slurmrl.plan.estimates.memory import BYTES, FLOAT32
from slurmrl.plan.estimates.pass_seconds import SAME, Narrower
from slurmrl.plan.estimates.shape import ModelShape, parameters

FP8_FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Families for which both servers store exactly the matrices in `TARGETS` in FP8."""
FP8_CAPABILITY: Final = (8, 9)
"""Minimum compute capability of GPUs with products of FP8 matrices."""
ALIGNMENT: Final = 16
"""Divisor that the sizes of FP8 matrices must have for TransformerEngine."""
BLOCK: Final = 128
"""Number of rows and of columns in a block of elements that share a scale."""
LARGEST: Final = 448.0
"""Largest number of float8_e4m3fn."""
MATRICES: Final = tuple(f"{name}.weight" for name in TARGETS)
"""Suffixes of the names of matrices in FP8."""
FACTORS: Final = "_scale_inv"
"""Suffix that turns the name of a matrix into the name of its factors."""


def fp8_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object ``values`` of a ``config.json``, changed to matrices in FP8."""
    gates = [f"model.layers.{n}.mlp.gate" for n in range(values["num_hidden_layers"])]
    kept = ["lm_head", *(gates if "num_experts" in values else ())]
    return {
        **values,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": kept,
        },
    }


def unequal_sizes(shape: ModelShape, tp: int, multiple: int) -> Iterator[tuple[str, float]]:
    """Yield name and value of a tensor rank's matrix sizes that ``multiple`` does not divide.

    Servers need multiples of `BLOCK`, because they join matrices and split them in whole blocks.
    """
    sizes = {
        "hidden_size": shape.hidden,
        "the size of a tensor rank's queries": shape.queries / tp,
        "the size of a tensor rank's keys": shape.kv_heads_of_rank(tp) * shape.head_dim,
    }
    if shape.expert_layers < shape.layers:
        sizes["intermediate_size of a tensor rank"] = shape.inner / tp
    if shape.experts:
        sizes["the inner size of experts of a tensor rank"] = shape.expert_inner / tp
    yield from ((name, size) for name, size in sizes.items() if size % multiple)


FP8_BYTES: Final = 1 + FLOAT32 / BLOCK**2
"""Bytes of an element in FP8, with its part of the block's factor."""
CACHE_BYTES: Final = 1
"""Bytes of an element of keys and values in FP8."""
ATTENTION: Final = ("--attention-backend",)
FASTER: Final = 1.6
"""Rate of FP8 matrix products, as a multiple of the bfloat16 rate (docs/benchmarks.md)."""


def unserved_on_cpus(kind: str, shape: ModelShape, arguments: Sequence[str] = ()) -> str:
    """Return why a server on CPUs cannot serve a trained model; empty if it can."""
    if kind == "sglang":
        sinks = shape.biased_experts and last_value(arguments, ATTENTION) is None
        return "SGLang's default attention on CPUs does not support sinks" if sinks else ""
    if shape.experts:
        return "vLLM on CPUs cannot load new weights of a model with experts from files"
    if shape.head_dim < LEAST_HEAD:
        return (
            f"vLLM on CPUs needs attention heads of at least {LEAST_HEAD} dimensions, and the "
            f"actor's have {shape.head_dim} (head_dim)"
        )
    return ""


def shape_on(shape: ModelShape, allocation: Allocation) -> ModelShape:
    """Return a model's shape for estimates and checks of a layout. Servers split every layer."""
    if not BACKENDS[allocation.backend].serves:
        return shape
    return replace(shape, whole_attention=False, equal_vocabulary=False, counted="")


def narrower_types(
    config: Config, shape: ModelShape, allocation: Allocation, dtype: str
) -> Narrower:
    """Return the effect of ``rollout.quantization`` and ``rollout.kv_cache_dtype``.

    ``allocation`` and ``dtype`` are layout and data type of a model. Only servers that the run
    starts have narrower types.
    """
    rollout, width = config.rollout, BYTES[dtype]
    if not BACKENDS[allocation.backend].serves or rollout.servers:
        return SAME
    cache = 1.0 if rollout.kv_cache_dtype is None else CACHE_BYTES / width
    if rollout.quantization is None:
        return Narrower(cache=cache)
    every = parameters(shape, allocation, "lm").total
    rows = shape.vocabulary_of_rank(allocation.sizes["tp"]) * (1 if shape.tied else 2)
    norms, routers = 2 * shape.layers + 1, shape.experts * shape.expert_layers
    kept = shape.hidden * (rows + norms + routers) + shape.tower
    share = (kept * width + (every - kept) * FP8_BYTES) / (every * width)
    return Narrower(weights=share, cache=cache, rate=FASTER)


def staged_weights(weights: float, narrower: Narrower, *, versions: int = 1) -> float:
    """Return the bytes of host memory for weights on their way to a server.

    ``weights`` is the number of bytes in the type of training. While a server loads narrower
    weights, their files exist in addition to the ``versions`` copies.
    """
    return weights * (versions + (narrower.weights if narrower.weights < 1 else 0))
