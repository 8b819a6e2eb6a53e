"""Checks of the models: their folders, architectures, adapters, lengths and tokenizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from slurmrl.config.allocation import Allocation
from slurmrl.config.allocation.allocation import AXIS_OF, BACKENDS
from slurmrl.config.schema import Lora, Model
from slurmrl.errors import Problem, UsageError
from slurmrl.fsio import inputs
from slurmrl.plan.checks import Draft
from slurmrl.plan.engine_rules import ENGINES, HF, lacking
from slurmrl.plan.estimates import shape
from slurmrl.plan.estimates.shape import bounded_parts, longest
from slurmrl.plan.inherited_settings import OWN_WEIGHTS
from slurmrl.plan.placement import REFERENCE, ROLLOUTS, uses_base
from slurmrl.registry import resolve

ADAPTER: Final = "adapter_config.json"
HF_ARCHITECTURES: Final = "slurmrl.models.hf_config:HFConfig"
LENGTH_LIMIT: Final = "slurmrl.models.hf_config:length_limit"
REFUSAL: Final = "slurmrl.models.adapters:refusal"
HF_REFUSAL: Final = "slurmrl.models.hf_adapters:refusal"
TENSOR_REFUSAL: Final = "slurmrl.models.hf_tensor:refusal"
MODEL_CONFIG: Final = "slurmrl.models.architecture:ModelConfig"
"""Names of functions and a class in a room that ``plan`` must not import."""


def weights(draft: Draft) -> Iterator[Problem]:
    """Check that each role has weights or an architecture that its engine can run."""
    actor = draft.config.actor
    for role, model in draft.models():
        inherited = (model.path, model.architecture) == (actor.path, actor.architecture)
        inherited &= model.implementation == actor.implementation
        if role in ("actor", *OWN_WEIGHTS) or not inherited:
            yield from _of_role(draft, role, model)


def _of_role(draft: Draft, role: str, model: Model) -> Iterator[Problem]:
    if model.architecture is not None:
        message = _rejection(draft, role, model, model.architecture, strict=True)
        if message:
            yield draft.problem((role, "architecture"), message)
    elif model.path is not None:
        message = _folder(draft, role, model, Path(model.path))
        if message:
            yield draft.reject((role, "path"), f": {message}", model.path)
    elif not draft.writes(role, "path") and not draft.writes(role, "architecture"):
        yield draft.problem((role,), "a path or an architecture is required")


def _folder(draft: Draft, role: str, model: Model, folder: Path) -> str | None:
    """Return the problem with a folder in Hugging Face format; None for a valid folder."""
    if folder.is_file():
        return "it is a file, but a model is a folder"
    if not folder.is_dir():
        return "there is no such folder"
    config = folder / shape.CONFIG
    if not config.exists() and (folder / ADAPTER).exists():
        return (
            f"it has adapters of PEFT ({ADAPTER}) but no model: merge the adapters into their base "
            "model (merge_and_unload and save_pretrained of PEFT) and set the resulting folder"
        )
    try:
        values = inputs.read_json(config)
    except UsageError as error:
        return f"its {shape.CONFIG} cannot be used: {error}"
    return _rejection(draft, role, model, values, strict=False)


def _rejection(
    draft: Draft, role: str, model: Model, values: Mapping[str, Any], *, strict: bool
) -> str | None:
    """Return why the role's engine cannot run an architecture; None if it can."""
    allocation = draft.allocations().get(role)
    if allocation is None:
        return None
    builtin = ENGINES[allocation.backend].architectures
    reader = HF_ARCHITECTURES if model.implementation == HF else builtin
    try:
        resolve(reader).from_hf(values, strict=strict)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


def implementations(draft: Draft) -> Iterator[Problem]:
    """Check that the layouts of models of transformers have only allowed axes."""
    for role, model in draft.models():
        allocation = draft.allocations().get(role)
        if model.implementation != "hf" or allocation is None:
            continue
        reasons, origin = hf_problems(model, allocation), ""
        if role != "actor" and not draft.writes(role, "implementation"):
            origin = " (inherited from the actor)"
            if not draft.writes(role, "backend"):
                known = hf_problems(draft.config.actor, allocation)
                reasons = [each for each in reasons if each not in known]
        for reason in reasons:
            yield draft.reject((role, "implementation"), f"{origin}: {reason}", "hf")
    rollout = draft.allocations().get(ROLLOUTS)
    if rollout is not None and draft.config.actor.implementation == "hf":
        split = not BACKENDS[rollout.backend].serves
        for reason in hf_problems(draft.config.actor, rollout, split=split):
            text = f" with actor.implementation hf: {reason}"
            yield draft.reject((ROLLOUTS, "backend"), text, str(rollout))


def hf_problems(model: Model, allocation: Allocation, *, split: bool = True) -> list[str]:
    """Return why a model of transformers cannot run on an allocation.

    With ``split``, tensor ranks share the model by the plan of transformers. Servers split known
    families in their own ways.
    """
    if reason := lacking(allocation.backend, "transformers"):
        return [reason]
    found = []
    others = [n for n, axis in AXIS_OF.items() if n not in "dt" and allocation.sizes[axis] > 1]
    if others:
        found.append(
            f"'{allocation}' uses {', '.join(others)}; models of transformers can only use d and t"
        )
    elif split and (ranks := allocation.sizes["tp"]) > 1:
        with suppress(UsageError):  # The check of weights reports an unreadable config.json.
            if reason := resolve(TENSOR_REFUSAL)(shape.config_values(model), "lm", ranks):
                found.append(reason)
        if model.model is not None and model.model.sequence_parallel:
            found.append("models of transformers cannot use sequence_parallel")
    if model.recompute == "selective":
        found.append("gradient_checkpointing must be off or full for models of transformers")
    return found


def adapters(draft: Draft) -> Iterator[Problem]:
    """Check that only trained models with initial weights have adapters."""
    for role, model in draft.models():
        if model.lora is None:
            continue
        reason = _adapter_rejection(draft, role, model, model.lora)
        if reason is not None:
            yield draft.reject((role, "lora"), f": {reason}")
    if draft.config.checkpoint.export_form == "adapter" and draft.config.actor.lora is None:
        reason = " without actor.lora; allowed: merged"
        yield draft.reject(("checkpoint", "export_form"), reason, "adapter")


def _adapter_rejection(draft: Draft, role: str, model: Model, lora: Lora) -> str | None:
    if role not in draft.trained:
        return f"{role} is not trained"
    if lack := draft.lacks(role, "adapters"):
        return lack
    own = draft.writes(role, "path") or draft.writes(role, "architecture")
    if draft.writes(role if own else "actor", "architecture"):
        return "the frozen weights of a new architecture would stay random; set a path instead"
    hf, reason = model.implementation == HF, None
    try:
        values = shape.config_values(model)
        config = resolve(HF_ARCHITECTURES if hf else MODEL_CONFIG).from_hf(values)
    except (UsageError, ValueError, TypeError):
        return None  # The check of weights reports the error.
    try:
        reason = resolve(HF_REFUSAL)(values, "lm", lora) if hf else resolve(REFUSAL)(config, lora)
    except UsageError as error:  # transformers cannot build the model.
        reason = str(error)
    return reason


def base_reference(draft: Draft) -> Iterator[Problem]:
    """Check that a reference is not offloaded if it shares the actor's weights."""
    if REFERENCE not in dict(draft.models()) or not uses_base(draft.config, REFERENCE):
        return
    for field in ("offload", "cpu_offload"):
        if draft.writes(REFERENCE, field) and getattr(draft.config.ref, field):
            reason = (
                ": with actor.lora the reference is the actor without its adapters; "
                f"set actor.{field}"
            )
            yield draft.reject((REFERENCE, field), reason, value=True)


def lengths(draft: Draft) -> Iterator[Problem]:
    """Check that every model supports the longest sequences.

    For longer sequences, the results of some models would depend on the rest of the batch.
    """
    limits = [limit for _, model in draft.models() if (limit := _length_limit(model))]
    if not limits:
        return
    lowest, silent = min(limits), [limit for limit in limits if limit.silent]
    for where, dataset, new_tokens in bounded_parts(draft.config):
        key = (*where, "max_prompt_tokens" if dataset.kind == "prompt" else "max_tokens")
        tokens = longest(dataset, new_tokens)
        if tokens is None and silent:
            yield draft.problem(key, f"is required: {min(silent).reason}")
        elif tokens is not None and tokens > lowest.tokens:
            message = f"sequences of up to {tokens} tokens are not allowed: {lowest.reason}"
            yield draft.problem(key, message)


def _length_limit(model: Model) -> Any | None:
    """Return a model's ``LengthLimit``; None without a limit.

    Ignore silent limits of the built-in decoder, whose results never depend on the batch.
    """
    if not (values := shape.known_config(model)):
        return None
    limit = resolve(LENGTH_LIMIT)(values)
    builtin = model.implementation == "builtin"
    return None if limit is None or (builtin and limit.silent) else limit


def stop_tokens(draft: Draft) -> Iterator[Problem]:
    """Check that the ids of stop tokens can be read and are in the vocabulary."""
    actor = draft.config.actor
    if not (values := shape.known_config(actor)):
        return
    size = shape.vocabulary(values)
    try:
        shape.stop_tokens(draft.config)
    except UsageError as error:
        where = "path" if actor.architecture is None else "architecture"
        yield draft.problem(("actor", where), str(error))
    for token in draft.config.rollout.stop_token_ids:
        if size is not None and token >= size:
            reason = f": the actor's vocabulary has the ids 0 to {size - 1}"
            yield draft.reject(("rollout", "stop_token_ids"), reason, token)


def tokenizer(draft: Draft) -> Iterator[Problem]:
    """Check that the actor has a tokenizer, which all models of the run share."""
    folder = draft.config.actor.tokenizer
    if folder is None:
        if not draft.writes("actor", "tokenizer") and not draft.writes("actor", "path"):
            message = "is required: an architecture without a path has no tokenizer"
            yield draft.problem(("actor", "tokenizer"), message)
    elif not Path(folder).is_dir() and draft.writes("actor", "tokenizer"):
        yield draft.reject(("actor", "tokenizer"), ": there is no such folder", folder)
