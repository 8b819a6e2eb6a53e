"""Checks of adapters: the roles that may have them, their models, and their exports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from slurmrl.config.schema import Lora, Model
from slurmrl.errors import Problem, UsageError
from slurmrl.plan import model_files
from slurmrl.plan.checks.draft import Draft
from slurmrl.plan.engine_rules import ENGINES
from slurmrl.plan.placement import REFERENCE, uses_base
from slurmrl.registry import resolve

REFUSAL: Final = "slurmrl.models.adapters:refusal"
MODEL_CONFIG: Final = "slurmrl.models.config:ModelConfig"
"""Their layer is above the plan's, so they are resolved by name."""


def adapters(draft: Draft) -> Iterator[Problem]:
    """Adapters belong to trained models of the built-in decoder that start from weights."""
    trained = {use.role for use in draft.algorithm.roles() if use.trained}
    for role, model in draft.models():
        if model.lora is None:
            continue
        reason = _refusal(draft, role, model, model.lora, trained=role in trained)
        if reason is not None:
            yield draft.problem((role, "lora"), f"is not allowed: {reason}")
    if draft.config.checkpoint.export_form == "adapter" and draft.config.actor.lora is None:
        message = "'adapter' is not allowed without actor.lora; allowed: merged"
        yield draft.problem(("checkpoint", "export_form"), message)


def _refusal(draft: Draft, role: str, model: Model, lora: Lora, *, trained: bool) -> str | None:
    if not trained:
        return f"{role} is not trained"
    allocation = draft.allocations().get(role)
    rules = ENGINES.get(allocation.backend) if allocation else None
    if allocation is not None and rules is not None and not rules.adapters:
        able = ", ".join(name for name, other in ENGINES.items() if other.adapters)
        return f"{allocation.backend} does not train adapters; allowed backends: {able}"
    if model.implementation != "builtin":
        return f"implementation {model.implementation} does not train adapters; allowed: builtin"
    own = draft.writes(role, "path") or draft.writes(role, "architecture")
    if draft.writes(role if own else "actor", "architecture"):
        return "the frozen weights of a new architecture would stay random; set a path instead"
    try:
        config = resolve(MODEL_CONFIG).from_hf(model_files.config_values(model))
    except (UsageError, ValueError, TypeError):
        return None  # reported by the check of weights
    reason: str | None = resolve(REFUSAL)(config, lora)
    return reason


def base_reference(draft: Draft) -> Iterator[Problem]:
    """A reference that is the actor's base has no memory of its own to offload."""
    if REFERENCE not in dict(draft.models()) or not uses_base(draft.config, REFERENCE):
        return
    for field in ("offload", "cpu_offload"):
        if draft.writes(REFERENCE, field) and getattr(draft.config.ref, field):
            message = (
                "true is not allowed: with actor.lora the reference is the actor without its "
                f"adapters; set actor.{field}"
            )
            yield draft.problem((REFERENCE, field), message)
