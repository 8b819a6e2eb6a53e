"""Whether the models of the fullest GPU fit into its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from slurmrl.config.allocation import parse
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.schema import Config, Model, role_key
from slurmrl.config.source import dotted
from slurmrl.errors import Problem
from slurmrl.plan.algorithms import Algorithm, uses_of
from slurmrl.plan.checks.draft import Draft
from slurmrl.plan.estimates import hardware, servers
from slurmrl.plan.estimates.costs import Checked, memories
from slurmrl.plan.estimates.gpus import Fullest, fullest_gpu, trainers_gpus
from slurmrl.plan.estimates.hardware import GIB
from slurmrl.plan.estimates.lengths import lengths_of
from slurmrl.plan.estimates.shape import shape_of
from slurmrl.plan.placement import ROLLOUTS, placements

STRONGER: Final = {"off": ("selective", "full"), "selective": ("full",), "full": ()}
"""Modes of activation checkpointing that keep less than another one."""


@dataclass(frozen=True)
class _Variant:
    """A checked configuration with other settings."""

    config: Config
    algorithm: Algorithm


def memory(draft: Draft) -> Iterator[Problem]:
    """The estimate for the fullest GPU, with a margin, fits into its memory."""
    limit = hardware.memory_bytes(draft.config.cluster)
    if limit is None or draft.config.cluster.gpus_per_worker == 0:
        return
    fullest = fullest_gpu(draft)
    if fullest.size + fullest.margin > limit:
        spare = f" and a margin of {_gib(fullest.margin)}"
        message = f"GPU {fullest.rank} {_needs(fullest, spare)}; it has {_gib(limit)}"
        where = ("cluster", "gpu_memory")
        yield draft.problem(
            where if draft.writes(*where) else ("actor", "backend"),
            f"{message}: {advice(draft, limit)}",
        )
    if reason := task_refusal(draft, limit):
        yield draft.problem((ROLLOUTS, "backend"), reason)


def task_refusal(checked: Checked, limit: int, *, certain: bool = False) -> str | None:
    """Why the model of rollout tasks does not fit into GPUs of ``limit`` bytes; None if it may, or
    without such tasks. ``certain``: assumed lengths of sequences do not count."""
    uses = uses_of(checked.config, checked.algorithm)
    rollout = placements(checked.config, [use.role for use in uses]).get(ROLLOUTS)
    estimate = memories(checked, certain=certain).get(ROLLOUTS)
    if rollout is None or rollout.group != ROLLOUTS or estimate is None:
        return None
    advice = "split them further with t"
    if BACKENDS[rollout.allocation.backend].serves:
        share = servers.share_in_task(checked.config.rollout.server_args, limit)
        least = servers.least(estimate, limit)
        if least > share:
            return (
                f"'{rollout.allocation}' is not allowed: a server needs {_gib(least)} of each GPU "
                f"({_gib(estimate.weights)} of weights, {_gib(estimate.sequence)} for the longest "
                f"sequence, and memory to compute with) and gets {_gib(share)}; {advice}"
            )
    elif estimate.weights >= limit:  # the rest is for keys and values; with less, requests wait
        return (
            f"'{rollout.allocation}' is not allowed: each GPU would hold {_gib(estimate.weights)} "
            f"of weights but has {_gib(limit)}; {advice}"
        )
    return None


def refusal(checked: Checked, name: str, total_bytes: int) -> str | None:
    """Why models do not fit into a real GPU; None if they may. Assumed lengths of sequences do not
    count, and a ``cluster.gpu_memory`` was compared at submission."""
    if checked.config.cluster.gpu_memory is not None:
        return None
    fullest = fullest_gpu(checked, certain=True, limit=total_bytes)
    if fullest.size <= total_bytes:
        return None
    return (
        f"a GPU {_needs(fullest)}; the {name} has {_gib(total_bytes)}: "
        f"{advice(checked, total_bytes)}. If its sequences are shorter than the configuration "
        "allows, set cluster.gpu_memory to more than the estimate to skip this check"
    )


def refusal_in_task(checked: Checked, name: str, total_bytes: int) -> str | None:
    """As `refusal`, for a GPU of a rollout task."""
    if checked.config.cluster.gpu_memory is not None:
        return None
    reason = task_refusal(checked, total_bytes, certain=True)
    return f"{name}: {reason}" if reason else None


def _needs(fullest: Fullest, spare: str = "") -> str:
    parts = ", ".join(f"{part} {_gib(size)}" for part, size in fullest.parts.items() if size)
    models = ", ".join(fullest.models)
    return f"is estimated to need {_gib(fullest.size)} for {models} ({parts}){spare}"


def advice(checked: Checked, limit: int) -> str:
    """What to change so that the models fit, the cheapest first."""
    remedies = [
        *_beside_servers(checked),
        *_checkpointing(checked, limit),
        "lower max_tokens_per_microbatch",
    ]
    lengths = lengths_of(checked.config, checked.algorithm, shape_of(checked.config.actor))
    if lengths is not None and lengths.assumed:
        key = "max_prompt_tokens" if checked.config.dataset.kind == "prompt" else "max_tokens"
        remedies.append(f"set dataset.{key} (without it, {lengths.longest} tokens are assumed)")
    return f"{', '.join(remedies)}, or split the models over more GPUs{_split(checked, limit)}"


def _split(checked: Checked, limit: int) -> str:
    """The smallest fsdp layout, in powers of two, of the actor and of all that have its layout,
    with which the models fit; empty if there is none that a batch can be split over."""
    actor = checked.config.actor
    backend = parse(actor.backend)
    if backend.backend != "fsdp":
        return ""
    sizes = dict(backend.sizes)
    most = checked.algorithm.batch_size // checked.algorithm.minibatches
    while (sizes := {**sizes, "dp": 2 * sizes["dp"]})["dp"] <= most:
        wider = str(replace(backend, sizes=sizes))
        models = {
            role: model.model_copy(update={"backend": wider})
            for role in checked.config.roles
            if (model := checked.config.find_model(role)) is not None
            and model.backend == actor.backend
        }
        variant = _Variant(_with_room(checked.config.with_models(models)), checked.algorithm)
        fullest = fullest_gpu(variant, limit=limit)
        if fullest.size + fullest.margin <= limit:
            return f": actor.backend={wider} needs {_gib(fullest.size)} of each"
    return ""


def _with_room(config: Config) -> Config:
    """The same with as many hosts as the layouts need."""
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"hosts": None})})


def _beside_servers(checked: Checked) -> Iterator[str]:
    gpus = trainers_gpus(checked)
    if gpus.has_servers and not gpus.server_sleeps:
        yield "set rollout.offload to true (then servers free the GPUs while other models compute)"


def _checkpointing(checked: Checked, limit: int) -> Iterator[str]:
    """The weakest activation checkpointing with which the models fit, if one does."""
    trained = [use.role for use in checked.algorithm.roles() if use.trained]
    for mode in ("selective", "full"):
        stronger: dict[str, Model] = {}
        for role in trained:
            model = checked.config.model(role)
            if mode in STRONGER[model.recompute] and _allowed(model, mode):
                update = {"gradient_checkpointing": mode}
                stronger[role] = model.model_copy(update=update)
        if not stronger:
            continue
        config = checked.config.with_models(stronger)
        fullest = fullest_gpu(_Variant(config, checked.algorithm), limit=limit)
        size = fullest.size
        if size + fullest.margin <= limit:
            keys = " and ".join(
                f"{dotted(role_key(role))}.gradient_checkpointing" for role in stronger
            )
            yield f"set {keys} to {mode} (then {_gib(size)})"
            return


def _allowed(model: Model, mode: str) -> bool:
    """transformers' models have no selective checkpointing."""
    return model.implementation != "hf" or mode == "full"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
