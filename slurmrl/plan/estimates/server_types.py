"""Models on servers: their split, narrower types of weights and caches, and vLLM on CPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from slurmrl.config.allocation import Allocation
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.schema import Config
from slurmrl.plan.engine_rules import LEAST_HEAD
from slurmrl.plan.estimates.memory import BYTES, FLOAT32
from slurmrl.plan.estimates.pass_seconds import SAME, Narrower
from slurmrl.plan.estimates.shape import ModelShape, parameters
from slurmrl.plan.fp8_rules import BLOCK

FP8_BYTES: Final = 1 + FLOAT32 / BLOCK**2
"""Bytes of an element, with its part of the factor of a block."""
CACHE_BYTES: Final = 1
"""Bytes of an element of keys and values in FP8."""
FASTER: Final = 1.6
"""Rate of FP8 matrix products, as a multiple of the bfloat16 rate (docs/benchmarks.md)."""


def vllm_on_cpus(shape: ModelShape) -> str:
    """Return why vLLM on CPUs cannot serve a model to which a run gives weights; or ""."""
    if shape.experts:
        return "vLLM on CPUs cannot load new weights of a model with experts from files"
    if shape.head_dim < LEAST_HEAD:
        return (
            f"vLLM on CPUs needs attention heads of at least {LEAST_HEAD} dimensions, and the "
            f"actor's have {shape.head_dim} (head_dim)"
        )
    return ""


def shape_on(shape: ModelShape, allocation: Allocation) -> ModelShape:
    """Return the shape with which an engine splits a model: servers split every layer."""
    if not BACKENDS[allocation.backend].serves:
        return shape
    return replace(shape, whole_attention=False, equal_vocabulary=False, counted="")


def narrower_types(
    config: Config, shape: ModelShape, allocation: Allocation, dtype: str
) -> Narrower:
    """Return the effect of ``rollout.quantization`` and ``rollout.kv_cache_dtype``.

    ``allocation`` and ``dtype`` belong to a model of the plan. Only the run's own servers have
    narrower types.
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
    """Return the host memory of weights on their way to a server.

    ``weights`` are the bytes of the weights in the type of training. The server's files exist next
    to the ``versions`` while it loads them, unless they are the same.
    """
    return weights * (versions + (narrower.weights if narrower.weights < 1 else 0))
