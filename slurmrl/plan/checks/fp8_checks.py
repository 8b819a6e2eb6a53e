"""Checks of FP8 in generation: the servers, the model and the layout must allow it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.schema import Config
from slurmrl.config.source import Source
from slurmrl.errors import Problem, UsageError
from slurmrl.plan.checks import Draft
from slurmrl.plan.engine_rules import last_value
from slurmrl.plan.estimates.shape import config_values, shape_of
from slurmrl.plan.fp8_rules import ALIGNMENT, BLOCK, FP8_FAMILIES, unequal_sizes
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.plan.precision import generating

FLAGS: Final = {
    "quantization": ("--quantization", "-q", "--quantization-config"),
    "kv_cache_dtype": ("--kv-cache-dtype",),
}
"""Flags in ``rollout.server_args`` that conflict with a setting."""
ONLINE: Final = "--quantization"
COMPUTES: Final = ("bfloat16", "float16")


def fp8(draft: Draft) -> Iterator[Problem]:
    """The run's own servers can compute with FP8 matrices of this actor."""
    rollout = draft.config.rollout
    allocation = draft.allocations().get(ROLLOUTS)
    if allocation is None or not BACKENDS[allocation.backend].serves or rollout.servers:
        return  # another check rejects the settings
    yield from _twice(draft)
    if rollout.quantization is None:
        if allocation.backend == "sglang":
            yield from _online(draft)
        return
    key = (ROLLOUTS, "quantization")
    value, actor = rollout.quantization, draft.config.actor
    if (dtype := generating(draft.config).dtype) not in COMPUTES:
        reason = (
            f": a server computes in bfloat16 around FP8 matrices, not in {dtype} (actor.dtype)"
        )
        yield draft.reject(key, reason, value)
    try:
        family = config_values(actor).get("model_type")
    except UsageError:
        return  # reported by the check of the weights
    if family not in FP8_FAMILIES:
        reason = f" with {family}; allowed families: {', '.join(FP8_FAMILIES)}"
        yield draft.reject(key, reason, value)
        return
    if (shape := shape_of(actor)) is None:
        return
    for name, size in unequal_sizes(shape, allocation.sizes["tp"], BLOCK):
        reason = (
            f" with '{allocation}': {name} is {size:g}, must be a multiple of {BLOCK} (blocks of "
            f"{BLOCK} x {BLOCK} elements share a factor)"
        )
        yield draft.reject(key, reason, value)
        return


def fp8_training(draft: Draft) -> Iterator[Problem]:
    """TransformerEngine can compute the matrices of a role in FP8."""
    told: set[tuple[str, str]] = set()
    for role, model in draft.models():
        allocation = draft.allocations().get(role)
        if model.fp8 is None or allocation is None or draft.lacks(role, "fp8"):
            continue  # another check rejects other engines
        shape, where = shape_of(model), role if draft.writes(role, "fp8") else "actor"
        reason = ""
        if model.transformer_engine is False:
            reason = " with transformer_engine: false, which computes in FP8"
        elif model.dtype != "bfloat16":
            reason = f" with dtype {model.dtype}: the rest of the model computes in bfloat16"
        elif shape is not None and (shape.experts or shape.latent is not None):
            kind = "experts" if shape.experts else "latent attention"
            reason = f": the actor has {kind}, and FP8 is for dense layers only"
        elif shape is not None:
            sizes = unequal_sizes(shape, allocation.sizes["tp"], ALIGNMENT)
            for name, size in sizes:
                reason = (
                    f" with '{allocation}': {name} is {size:g}, must be a multiple of {ALIGNMENT}"
                )
        if reason and (where, reason) not in told:
            told.add((where, reason))  # roles inherit the setting
            yield draft.reject((where, "fp8"), reason, model.fp8)


def _twice(draft: Draft) -> Iterator[Problem]:
    """Only one setting chooses a precision."""
    rollout = draft.config.rollout
    for name, flags in FLAGS.items():
        if getattr(rollout, name) is None:
            continue
        if last_value(rollout.server_args, flags) is not None:
            reason = f" {flags[0]} with rollout.{name}, which sets the precision of the server"
            yield draft.problem((ROLLOUTS, "server_args"), f"must not have{reason}")


def _online(draft: Draft) -> Iterator[Problem]:
    """SGLang quantizes weights only when it starts, and cannot load others afterwards."""
    if last_value(draft.config.rollout.server_args, (ONLINE,)) is not None:
        message = (
            f"must not have {ONLINE}: SGLang cannot load new weights after it has quantized the "
            "first ones; set rollout.quantization: fp8"
        )
        yield draft.problem((ROLLOUTS, "server_args"), message)


def fp8_without_gpus(config: Config, source: Source, cause: str) -> Iterator[Problem]:
    """Yield a problem for each setting that servers without GPUs do not support.

    ``cause``: why the workers of generation have no GPUs.
    """
    for name in FLAGS:
        if (value := getattr(config.rollout, name)) is not None:
            message = f"'{value}' is not allowed: servers compute in FP8 on GPUs only, and {cause}"
            yield source.problem((ROLLOUTS, name), message)
