"""Memory, floating-point operations and seconds of calls.

A multiply-add counts as two operations. Only matrix products count. Attention counts the pairs of
tokens that the causal mask keeps. docs/allocation.md has the sources of the formulas.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

from slurmrl.config.allocation import Allocation
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.schema import Cluster, Config, Model
from slurmrl.plan.algorithms import Algorithm, uses_of
from slurmrl.plan.dataflow import Call, Head, Method, RoleUse
from slurmrl.plan.engine_rules import BUILT_IN, can
from slurmrl.plan.estimates.hardware import GIB, Hardware, Machine, hardware_of, shipped_gpu
from slurmrl.plan.estimates.memory import (
    BYTES,
    FLOAT32,
    SHARDED,
    Memory,
    MemoryDemand,
    estimate,
    kv_bytes_per_token,
    whole_weights,
)
from slurmrl.plan.estimates.pass_seconds import (
    REPEATED,
    SMALL_BYTES,
    DecodeJob,
    LengthDistribution,
    PassJob,
    Seconds,
    forward_flops_per_token,
    generation,
    inference,
    training,
)
from slurmrl.plan.estimates.server_types import FASTER, narrower_types, shape_on
from slurmrl.plan.estimates.shape import (
    Lengths,
    ModelShape,
    lengths_of,
    shape_of,
    uses_sequence_parallel,
)
from slurmrl.plan.placement import (
    LARGEST_HOST,
    ROLLOUTS,
    Placement,
    layout_of,
    model_of,
    placements,
)

PROCESS: Final = 640 * 2**20
"""Bytes of resident memory of a worker without GPUs, in addition to its tensors. They hold Python,
torch, the tokenizer, and memory that the allocator does not return."""
_UNITS: Final = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def memory_bytes(cluster: Cluster) -> int | None:
    """Return the bytes of one GPU's memory from ``gpu_memory`` or the GPU type; None if unknown."""
    if cluster.gpu_memory is not None:
        return memory_of(cluster.gpu_memory)
    size = re.search(r"(\d+)gb?(?![a-z])", (cluster.slurm.gpu_type or "").lower())
    gpu = shipped_gpu(cluster)
    if gpu is None:
        return None
    return int(size[1]) * GIB if size else gpu.memory_bytes


def margin(needed: int) -> int:
    """Return the bytes that must stay free in addition to an estimate.

    3 GiB are for the CUDA context and NCCL's buffers, and 10 % are for fragmentation.
    """
    return 3 * GIB + needed // 10


def memory_of(text: str) -> int:
    """Return the bytes of a size in Slurm's notation; a number without a unit is in mebibytes."""
    unit = text[-1] if text[-1] in _UNITS else "M"
    return int(text.rstrip("KMGT")) * _UNITS[unit]


def binary_size(number: int) -> str:
    """Return a number of bytes with three digits and a binary unit, such as ``1.5 GiB``."""
    for unit, factor in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number} B"


class Checked(Protocol):
    """Settings, a draft of settings, or a variant of settings."""

    @property
    def config(self) -> Config: ...
    @property
    def algorithm(self) -> Algorithm: ...


@dataclass(frozen=True)
class Variant:
    """A checked configuration in which some settings are replaced."""

    config: Config
    algorithm: Algorithm


class MeanTokens(NamedTuple):
    """Mean numbers of tokens in prompts and completions. A configuration has only maxima."""

    prompt: float
    response: float


class CallCost(NamedTuple):
    """Floating-point operations of a call, and its seconds by cause."""

    flops: int
    parts: Seconds | None
    """Seconds by cause; None for unknown hardware."""

    @property
    def seconds(self) -> float | None:
        return None if self.parts is None else sum(self.parts.values())


def placed_models(checked: Checked) -> dict[str, Placement]:
    """Return a mapping from a configuration's models, and its generation, to valid placements."""
    return placements(
        checked.config, [use.role for use in uses_of(checked.config, checked.algorithm)]
    )


def memories(checked: Checked, *, certain: bool = False) -> dict[str, Memory]:
    """Return a mapping from each model of known architecture to its memory.

    With ``certain``, leave out memory that depends on an assumed length of sequences.
    """
    estimates = {}
    for name, placement in placed_models(checked).items():
        demand = demand_of(checked, name, placement)
        if demand is None:
            continue
        lengths = demand.lengths
        if certain and lengths is not None and lengths.assumed:
            lengths = replace(lengths, longest=max(lengths.new_tokens, 1))
        estimates[name] = estimate(replace(demand, lengths=lengths))
        if name == ROLLOUTS:
            estimates[name] = _of_server(checked.config, demand, estimates[name])
    return estimates


def _of_server(config: Config, demand: MemoryDemand, memory: Memory) -> Memory:
    """Return the memory of a server, which may store weights and caches in narrower types."""
    narrower = narrower_types(config, demand.shape, demand.allocation, demand.model.dtype)
    return replace(
        memory,
        weights=round(memory.weights * narrower.weights),
        kv_cache=round(memory.kv_cache * narrower.cache),
        sequence=round(memory.sequence * narrower.cache),
    )


def demand_of(checked: Checked, name: str, placement: Placement) -> MemoryDemand | None:
    """Return the facts that determine the memory of the plan's model ``name``.

    Return None if its architecture is unknown.
    """
    config, algorithm = checked.config, checked.algorithm
    uses = {use.role: use for use in uses_of(config, algorithm)}
    model = model_of(config, name)
    shape = shape_of(model)
    if shape is None:
        return None
    shape = shape_on(shape, placement.allocation)
    names = list(placed_models(checked))
    calls = algorithm.calls(config)
    methods = {call.method for call in calls if layout_of(call, names) == name}
    use = uses.get(name) or RoleUse(name, trained=False)
    return MemoryDemand(
        model=model,
        shape=shape,
        allocation=placement.allocation,
        head=use.head,
        trained=use.trained,
        computes=bool(methods - {Method.GENERATE}),
        generates=Method.GENERATE in methods and not (name == ROLLOUTS and config.rollout.servers),
        lengths=lengths_of(config, algorithm, shape),
        minibatches=algorithm.minibatches if use.trained else 1,
        replays_experts=name in ("actor", ROLLOUTS) and replays_experts(checked),
        cache_bytes=config.rollout.episode.cache_bytes,
        copies=config.checkpoint.asynchronous,
        on_cpus=config.cluster.gpus_per_worker == 0,
    )


def replays_experts(checked: Checked) -> bool:
    """Return whether generation records experts, which the actor's calls replay."""
    return checked.config.rollout.replay_experts and checked.algorithm.replays


def cost(
    checked: Checked, call: Call, placed: dict[str, Placement], mean: MeanTokens | None = None
) -> CallCost | None:
    """Return the cost of a call over all sequences of a step.

    Without ``mean``, sequences have their maximum length. Return None for a call without a model,
    or if the architecture or the lengths are unknown.
    """
    name = layout_of(call, list(placed))
    if name is None or name not in placed:
        return None
    return cost_in(
        checked, call, name, model_of(checked.config, name), placed[name].allocation, mean
    )


def cost_in(
    checked: Checked,
    call: Call,
    name: str,
    model: Model,
    allocation: Allocation,
    mean: MeanTokens | None = None,
) -> CallCost | None:
    """Return the cost of a call if ``model`` and ``allocation`` replace the plan's settings."""
    config, algorithm = checked.config, checked.algorithm
    shape = shape_of(model)
    most = lengths_of(config, algorithm, shape)
    if shape is None or most is None:
        return None
    shape, lengths = shape_on(shape, allocation), _typical(most, mean)
    uses = uses_of(config, algorithm)
    use = next((use for use in uses if use.role == call.role), RoleUse(name, False))
    frozen = model.lora is not None
    flops = call_flops(shape, use.head, call.method, lengths, algorithm.epochs, frozen=frozen)
    hardware = hardware_of(config.cluster)
    elsewhere = name == ROLLOUTS and bool(config.rollout.servers)
    if hardware is None or elsewhere:
        return CallCost(flops, None)
    machine = _machine(config.cluster, hardware, allocation)
    if call.method is Method.GENERATE:
        job = _decode_job(checked, shape, model, allocation, lengths, most)
        return CallCost(flops, generation(job, machine))
    trains = call.method is Method.TRAIN_STEP
    rank = lengths.sequences * lengths.longest / allocation.sizes["dp"]
    job_of_rank = _pass_job(shape, use.head, model, allocation, lengths, rank)
    if not trains:
        return CallCost(flops, inference(job_of_rank, machine))
    steps = algorithm.minibatches
    each = training(replace(job_of_rank, tokens=rank / steps), machine)
    passes = steps * algorithm.epochs
    return CallCost(flops, {cause: passes * seconds for cause, seconds in each.items()})


class Generating(NamedTuple):
    """The sequences of a step that one copy of a model generates, and its GPUs."""

    job: DecodeJob
    machine: Machine


def generating(checked: Checked, name: str, mean: MeanTokens | None = None) -> Generating | None:
    """Return the sequences that the plan's model ``name`` generates in a step.

    Return None if the plan has no such model, or if architecture, hardware or lengths are unknown.
    """
    config, placed = checked.config, placed_models(checked).get(name)
    hardware, shape = hardware_of(config.cluster), shape_of(model_of(config, name))
    most = lengths_of(config, checked.algorithm, shape)
    elsewhere = name == ROLLOUTS and bool(config.rollout.servers)
    if placed is None or hardware is None or shape is None or most is None or elsewhere:
        return None
    allocation, lengths = placed.allocation, _typical(most, mean)
    shape = shape_on(shape, allocation)
    job = _decode_job(checked, shape, model_of(config, name), allocation, lengths, most)
    return Generating(job, _machine(config.cluster, hardware, allocation))


def _machine(cluster: Cluster, hardware: Hardware, allocation: Allocation) -> Machine:
    fused = allocation.backend not in BUILT_IN
    per_host = cluster.workers_per_host or LARGEST_HOST
    rates = hardware.fused if fused else hardware.efficiency
    return Machine(hardware.gpu, per_host, rates)


def _typical(most: Lengths, mean: MeanTokens | None) -> Lengths:
    """Return the lengths of a step in which all sequences have the mean length."""
    if mean is None:
        return most
    response = min(round(mean.response), most.new_tokens)
    total = min(round(mean.prompt) + response, most.longest)
    return replace(most, longest=max(total, 1), new_tokens=response)


def _pass_job(
    shape: ModelShape,
    head: Head,
    model: Model,
    allocation: Allocation,
    lengths: Lengths,
    tokens: float,
) -> PassJob:
    sharded = allocation.backend in SHARDED
    return PassJob(
        shape=shape,
        allocation=allocation,
        head=head,
        tokens=tokens,
        length=lengths.longest,
        microbatch=model.max_tokens_per_microbatch,
        width=BYTES[model.dtype],
        sharded=sharded,
        sequence_parallel=uses_sequence_parallel(model, allocation),
        virtual=(model.model and model.model.virtual_pipeline_model_parallel_size) or 1,
        repeated=REPEATED[model.recompute],
        frozen=model.lora is not None,
        optimizer_bytes=_optimizer_bytes(model),
        rate=FASTER if model.fp8 and can(allocation.backend, "fp8") else 1.0,
        offloaded=model.cpu_offload,
        small=sharded and whole_weights(shape, allocation, "float32") <= SMALL_BYTES,
    )


def _optimizer_bytes(model: Model) -> float:
    """Return the bytes that an optimizer step moves for an element.

    The step reads the gradient, reads and writes the float32 weight and moments, and writes the
    weight in the dtype of computation.
    """
    return FLOAT32 + 2 * FLOAT32 * (1 + len(model.optimizer.moments)) + BYTES[model.dtype]


def _decode_job(
    checked: Checked,
    shape: ModelShape,
    model: Model,
    allocation: Allocation,
    lengths: Lengths,
    most: Lengths,
) -> DecodeJob:
    return DecodeJob(
        shape=shape,
        allocation=allocation,
        sequences=lengths.sequences / allocation.sizes["dp"],
        prompt=lengths.longest - lengths.new_tokens,
        group=lengths.group,
        lengths=LengthDistribution(lengths.new_tokens, max(most.new_tokens, 1)),
        cache_tokens=_cache_tokens(checked, shape, model, allocation),
        width=BYTES[model.dtype],
        narrower=narrower_types(checked.config, shape, allocation, model.dtype),
    )


def _cache_tokens(
    checked: Checked, shape: ModelShape, model: Model, allocation: Allocation
) -> float:
    """Return the number of tokens that fit into the cache of one copy of the model.

    The cache of a built-in engine holds all sequences unless ``cache_bytes`` limits it. A server's
    cache uses 90 % of the GPU memory that weights and the CUDA context leave.
    """
    narrower = narrower_types(checked.config, shape, allocation, model.dtype)
    each = kv_bytes_per_token(shape, allocation, model.dtype) * narrower.cache
    limited = checked.config.rollout.episode.cache_bytes
    gpu = memory_bytes(checked.config.cluster)
    if not BACKENDS[allocation.backend].serves or gpu is None:
        return math.inf if limited is None else limited / each
    weights = whole_weights(shape, allocation, model.dtype) * narrower.weights
    left = 0.9 * gpu - margin(0) - weights
    return max(left, 0.0) / each


BACKWARD: Final = 2
"""Cost of a backward pass, in forward passes."""


def attention_flops(shape: ModelShape, length: int) -> int:
    """Return the operations of attention scores and weighted sums for one sequence."""
    sizes = 2 * shape.queries
    if shape.latent is not None:
        sizes = shape.heads * (shape.latent.key + shape.latent.value)
    return 2 * shape.layers * sizes * (length * (length + 1) // 2)


def call_flops(
    shape: ModelShape,
    head: Head,
    method: Method,
    lengths: Lengths,
    passes: int,
    *,
    frozen: bool = False,
) -> int:
    """Return the operations for all sequences of a step at their maximum length.

    A train_step makes ``passes`` passes over the sequences. ``frozen`` weights have adapters and
    need no gradients.
    """
    total = lengths.sequences * forward_flops(shape, head, lengths.longest)
    if method is Method.GENERATE:  # The samples of an item share one prefill.
        prompt = lengths.longest - lengths.new_tokens
        total -= (lengths.sequences - lengths.sequences // lengths.group) * forward_flops(
            shape, head, prompt
        )
    if method is Method.TRAIN_STEP:
        tokens = lengths.sequences * lengths.longest * int(frozen)
        total = total * (1 + BACKWARD) - tokens * round(forward_flops_per_token(shape, head))
        total *= passes
    return total


def forward_flops(shape: ModelShape, head: Head, length: int) -> int:
    """Return the operations of a forward pass over one sequence."""
    return length * round(forward_flops_per_token(shape, head)) + attention_flops(shape, length)
