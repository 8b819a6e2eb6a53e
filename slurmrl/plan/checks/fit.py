"""Check whether a layout fits an architecture, and models fit into the fullest GPU's memory.

Each rule of a layout is a function that yields misfits. To add a rule, write the function and list
it in RULES. A rule belongs here if it can be checked before any process starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from slurmrl.config.allocation import Allocation, parse
from slurmrl.config.allocation.allocation import BACKENDS, divisors
from slurmrl.config.schema import Config, Model, ParallelSizes, role_key
from slurmrl.config.source import dotted
from slurmrl.errors import ConfigError, Problem, UnreadableInputError, UsageError
from slurmrl.plan.checks import Draft
from slurmrl.plan.engine_rules import HF, can, lacking
from slurmrl.plan.estimates import call_costs
from slurmrl.plan.estimates.call_costs import Checked, Variant, memories, placed_models
from slurmrl.plan.estimates.hardware import GIB, hardware_of
from slurmrl.plan.estimates.shape import Lengths, ModelShape, expert_tp, lengths_of, shape_of
from slurmrl.plan.estimates.worker_memory import (
    Fullest,
    fullest_gpu,
    least,
    share_in_task,
    trainers_gpus,
)
from slurmrl.plan.placement import ROLLOUTS


@dataclass(frozen=True)
class Fit:
    """A model and a layout to check; ``minibatches`` is 0 for a model that is not trained."""

    model: Model
    allocation: Allocation
    shape: ModelShape | None
    lengths: Lengths | None
    minibatches: int = 0

    @property
    def sizes(self) -> ParallelSizes:
        return self.model.model or ParallelSizes()

    @property
    def virtual(self) -> int:
        return self.sizes.virtual_pipeline_model_parallel_size or 1


@dataclass(frozen=True)
class Misfit:
    """A size that does not fit the architecture, the data or the other sizes."""

    axis: str
    """Name of an axis (such as ``tp`` or ``etp``), ``length``, or a field of ``model``."""
    reason: str
    value: str = ""
    """Value that is not allowed; empty if the layout as a whole is not allowed."""


Found: TypeAlias = Iterator[Misfit]
Rule: TypeAlias = Callable[[Fit], Found]


def check(fit: Fit) -> Found:
    """Yield only the first misfit of each axis: a new size may also remove the other misfits."""
    reported = set()
    for rule in RULES:
        for misfit in rule(fit):
            part = PART_OF.get(misfit.axis, misfit.axis)
            if part not in reported:
                yield misfit
            reported.add(part)


def _divisions(fit: Fit) -> Found:
    """Yield sizes that do not divide the numbers of heads, layers or experts that they split."""
    allocation, shape = fit.allocation, fit.shape
    if shape is None:
        return
    tp, pp, ep = (allocation.sizes[axis] for axis in ("tp", "pp", "ep"))
    split = [
        ("tp", f"t{tp}", tp, "num_attention_heads", shape.heads),
        ("tp", f"t{tp}", tp, "hidden_size", shape.hidden),
        ("pp", f"p{pp}", pp, "num_hidden_layers", shape.layers),
        ("ep", f"e{ep}", ep, "the number of experts", shape.experts),
    ]
    if shape.expert_layers < shape.layers:
        split.append(("tp", f"t{tp}", tp, "intermediate_size", shape.inner))
    served = BACKENDS[allocation.backend].serves
    # transformers never splits an expert over ranks. Servers split each expert.
    shares = fit.model.implementation == HF and not served
    if shape.shared_inner and not shares:
        split.append(("tp", f"t{tp}", tp, "the inner size of shared experts", shape.shared_inner))
    if shape.expert_layers and allocation.experts is None and not shares:
        split.append(("tp", f"t{tp}", tp, "the inner size of experts", shape.expert_inner))
    if not can(allocation.backend, "head_copies"):
        split.append(("tp", f"t{tp}", tp, "num_key_value_heads", shape.kv_heads))
    if shape.experts and not shares:
        etp = allocation.etp
        split.append(("etp", f"t{etp}", etp, "moe_intermediate_size", shape.expert_inner))
    for axis, name, size, what, number in split:
        if number % size:
            reason = f"{name} does not divide {what} {number}; allowed: {divisors(number)}"
            yield Misfit(axis, reason)


def _copied_heads(fit: Fit) -> Found:
    """Yield a tensor size at which ranks can have neither equal parts nor copies of key heads."""
    shape, tp = fit.shape, fit.allocation.sizes["tp"]
    if shape is None or shape.heads % tp:
        return
    if shape.kv_heads % tp and tp % shape.kv_heads:
        yield Misfit(
            "tp",
            f"t{tp} neither divides num_key_value_heads {shape.kv_heads} nor is a multiple of it; "
            "ranks must divide the heads or hold whole copies",
        )


def padded_vocabulary(fit: Fit) -> int | None:
    """Return the rows of the embedding with padding; None if the architecture is unknown."""
    if fit.shape is None:
        return None
    tp = fit.allocation.sizes["tp"]
    megatron = fit.allocation.backend == "megatron"
    multiple = tp * (fit.sizes.make_vocab_size_divisible_by if megatron else 1)
    return -(-fit.shape.vocabulary // multiple) * multiple


def _vocabulary(fit: Fit) -> Found:
    """Yield a padded vocabulary that leaves a rank without a real token."""
    padded, tp = padded_vocabulary(fit), fit.allocation.sizes["tp"]
    if padded is None or fit.shape is None or tp == 1:
        return
    if padded // tp * (tp - 1) < fit.shape.vocabulary:
        return
    size, multiple = fit.shape.vocabulary, fit.sizes.make_vocab_size_divisible_by
    reason = (
        f"vocab_size {size}, padded to {padded}, leaves at least one of t{tp} ranks without a token"
    )
    most = next((each for each in (64, 32, 16, 8, 4, 2, 1) if _is_spread(size, tp, each)), None)
    if padded // tp == 1 or most is None or most >= multiple:
        yield Misfit("tp", reason)
        return
    name = "make_vocab_size_divisible_by"
    yield Misfit(name, f"{reason}; set {name} to {most} instead of {multiple}")


def _is_spread(vocabulary: int, tp: int, multiple: int) -> bool:
    """Return whether each rank holds a token if the rows are padded to ``multiple``."""
    rows = -(-vocabulary // (tp * multiple)) * multiple
    return rows * (tp - 1) < vocabulary


def _layers(fit: Fit) -> Found:
    pp, virtual = fit.allocation.sizes["pp"], fit.virtual
    if virtual > 1 and pp == 1:
        yield Misfit(
            "virtual_pipeline_model_parallel_size",
            "virtual stages need more than one pipeline stage (p above 1)",
            f"{virtual}",
        )
    elif fit.shape is not None and fit.shape.layers % (pp * virtual):
        yield Misfit(
            "virtual_pipeline_model_parallel_size",
            f"p{pp} times {virtual} does not divide num_hidden_layers {fit.shape.layers}",
            f"{virtual}",
        )


def _sequence_parallel(fit: Fit) -> Found:
    if fit.sizes.sequence_parallel and fit.allocation.sizes["tp"] == 1:
        yield Misfit(
            "sequence_parallel", "sequence parallelism needs tensor parallelism (t above 1)", "true"
        )


def _whole_sequences(fit: Fit) -> Found:
    trains_experts = fit.minibatches > 0 and fit.shape is not None and fit.shape.experts > 0
    split = fit.allocation.sizes["tp"] > 1
    reason = lacking(fit.allocation.backend, "whole_sequences")
    if reason and trains_experts and split and fit.sizes.sequence_parallel is False:
        yield Misfit("sequence_parallel", reason, "false")


def _positions(fit: Fit) -> Found:
    if fit.shape is None or fit.lengths is None or fit.shape.positions is None:
        return
    if fit.lengths.longest > fit.shape.positions:
        yield Misfit(
            "length",
            f"sequences of up to {fit.lengths.longest} tokens exceed max_position_embeddings "
            f"{fit.shape.positions}",
        )


def _experts(fit: Fit) -> Found:
    ep, etp = fit.allocation.sizes["ep"], fit.allocation.etp
    if fit.shape is not None and not fit.shape.experts and (ep > 1 or etp > 1):
        axis, size = ("ep", f"e{ep}") if ep > 1 else ("etp", f"t{etp} of ffn")
        yield Misfit(axis, "the model has no experts", size)
    reason = lacking(fit.allocation.backend, "split_biases")
    split = expert_tp(fit.allocation)
    if reason and fit.shape is not None and fit.shape.biased_experts and split > 1:
        yield Misfit("etp", reason, f"t{split}")


def _microbatches(fit: Fit) -> Found:
    """Yield a layout that leaves a pipeline stage without a micro-batch in an optimizer step."""
    pp = fit.allocation.sizes["pp"]
    if fit.lengths is None or not fit.minibatches:
        return
    dp = fit.allocation.sizes["dp"]
    each = fit.lengths.sequences // dp // fit.minibatches
    if each < 1:
        yield Misfit(
            "dp",
            f"d{dp} leaves a rank without a sequence in a minibatch (sequences in a step: "
            f"{fit.lengths.sequences}, minibatches: {fit.minibatches})",
        )
    elif each < pp:
        yield Misfit(
            "pp",
            f"p{pp} needs at least {pp} micro-batches, but a rank has {each} in a minibatch "
            f"(d{dp}, {fit.minibatches} per step; sequences in a step: {fit.lengths.sequences})",
        )
    elif fit.virtual > 1 and each % pp:
        yield Misfit(
            "virtual_pipeline_model_parallel_size",
            f"the interleaved schedule needs a multiple of p{pp} micro-batches, and a rank's "
            f"minibatch has {each} sequences",
            f"{fit.virtual}",
        )


PART_OF: Final = {
    "make_vocab_size_divisible_by": "tp",
    "virtual_pipeline_model_parallel_size": "pp",
}
"""Mapping from a model's field to the axis whose misfits include the field's misfits."""
RULES: Final[tuple[Rule, ...]] = (
    _divisions,
    _copied_heads,
    _vocabulary,
    _layers,
    _sequence_parallel,
    _whole_sequences,
    _positions,
    _experts,
    _microbatches,
)


STRONGER: Final = {"off": ("selective", "full"), "selective": ("full",), "full": ()}
"""Mapping from a mode of activation checkpointing to modes that keep fewer activations."""


def memory(draft: Draft) -> Iterator[Problem]:
    """Check that the estimate for the fullest GPU, with a margin, fits into its memory."""
    limit = call_costs.memory_bytes(draft.config.cluster)
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
    if reason := task_rejection(draft, limit):
        yield draft.problem((ROLLOUTS, "backend"), reason)


def hardware(draft: Draft) -> Iterator[Problem]:
    """Check that the hardware profile can be read and describes the hardware of the ranks."""
    try:
        hardware_of(draft.config.cluster)
    except ConfigError as error:
        yield from error.problems
    except (UsageError, UnreadableInputError) as error:
        yield draft.problem(("cluster", "hardware"), str(error))


def task_rejection(checked: Checked, limit: int, *, certain: bool = False) -> str | None:
    """Return why the model of rollout tasks does not fit into GPUs of ``limit`` bytes.

    Return None if the model may fit, or without such tasks. With ``certain``, ignore assumed
    lengths of sequences.
    """
    rollout = placed_models(checked).get(ROLLOUTS)
    estimate = memories(checked, certain=certain).get(ROLLOUTS)
    if rollout is None or rollout.group != ROLLOUTS or estimate is None:
        return None
    advice = "split them further with t"
    if BACKENDS[rollout.allocation.backend].serves:
        share = share_in_task(checked.config.rollout.server_args, limit)
        needed = least(estimate, limit)
        if needed > share:
            return (
                f"'{rollout.allocation}' is not allowed: a server needs {_gib(needed)} of each GPU "
                f"({_gib(estimate.weights)} of weights, {_gib(estimate.sequence)} for the longest "
                f"sequence, and memory to compute with) and gets {_gib(share)}; {advice}"
            )
    elif estimate.weights >= limit:  # Only weights must fit: requests can wait for cache memory.
        return (
            f"'{rollout.allocation}' is not allowed: each GPU would hold {_gib(estimate.weights)} "
            f"of weights but has {_gib(limit)}; {advice}"
        )
    return None


def rejection(checked: Checked, name: str, total_bytes: int) -> str | None:
    """Return why models do not fit into the GPU of a worker; None if they may fit.

    Ignore assumed lengths of sequences, and ``cluster.gpu_memory``, which the submission has
    checked.
    """
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


def rejection_in_task(checked: Checked, name: str, total_bytes: int) -> str | None:
    """Return why a model does not fit into the GPU of a rollout task; None if it may fit."""
    if checked.config.cluster.gpu_memory is not None:
        return None
    reason = task_rejection(checked, total_bytes, certain=True)
    return f"{name}: {reason}" if reason else None


def _needs(fullest: Fullest, spare: str = "") -> str:
    parts = ", ".join(f"{part} {_gib(size)}" for part, size in fullest.parts.items() if size)
    models = ", ".join(fullest.models)
    return f"is estimated to need {_gib(fullest.size)} for {models} ({parts}){spare}"


def advice(checked: Checked, limit: int) -> str:
    """Return advice about changes that make the models fit, the cheapest change first."""
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
    """Return advice about the smallest fsdp layout, in powers of two, that makes the models fit.

    The layout is for the actor and all models with the actor's layout. Return an empty string if no
    such layout can split the batch.
    """
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
        variant = Variant(_with_room(checked.config.with_models(models)), checked.algorithm)
        fullest = fullest_gpu(variant, limit=limit)
        if fullest.size + fullest.margin <= limit:
            return f": actor.backend={wider} needs {_gib(fullest.size)} of each"
    return ""


def _with_room(config: Config) -> Config:
    """Return the configuration with as many hosts as the layouts need."""
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"hosts": None})})


def _beside_servers(checked: Checked) -> Iterator[str]:
    gpus = trainers_gpus(checked)
    if gpus.has_servers and not gpus.server_sleeps:
        yield "set rollout.offload to true (then servers free the GPUs while other models compute)"


def _checkpointing(checked: Checked, limit: int) -> Iterator[str]:
    """Yield advice about the weakest activation checkpointing with which the models fit."""
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
        fullest = fullest_gpu(Variant(config, checked.algorithm), limit=limit)
        size = fullest.size
        if size + fullest.margin <= limit:
            keys = " and ".join(
                f"{dotted(role_key(role))}.gradient_checkpointing" for role in stronger
            )
            yield f"set {keys} to {mode} (then {_gib(size)})"
            return


def _allowed(model: Model, mode: str) -> bool:
    """Return whether a model allows a mode. Models of transformers have no selective mode."""
    return model.implementation != "hf" or mode == "full"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
