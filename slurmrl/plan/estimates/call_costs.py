"""Floating-point operations and seconds of calls, on GPUs known by the names that clusters use.

A multiply-add counts as two operations. Only matrix products count; attention counts the pairs of
tokens that the causal mask keeps. Sources: docs/allocation.md. A new GPU is one line of `KNOWN`,
with numbers of the vendor's data sheet: memory, dense bfloat16 operations, memory bandwidth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

from slurmrl.config.schema import Cluster, Config, Model
from slurmrl.plan.algorithms import Algorithm, uses_of
from slurmrl.plan.dataflow import Call, Head, Method, RoleUse
from slurmrl.plan.estimates.memory import (
    Memory,
    MemoryDemand,
    estimate,
    kv_bytes_per_token,
    whole_weights,
)
from slurmrl.plan.estimates.shape import Lengths, ModelShape, lengths_of, shape_of
from slurmrl.plan.placement import ROLLOUTS, Placement, layout_of, model_of, placements

GIB: Final = 2**30
PROCESS: Final = 640 * 2**20
"""Resident memory of a worker without GPUs, in addition to its tensors: Python, torch, the
tokenizer, and memory that the allocator does not return."""
_UNITS: Final = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Gpu:
    memory_bytes: int | None
    """None if GPUs of this name differ in size."""
    flops_per_s: float
    bytes_per_s: float


KNOWN: Final = {
    "v100": Gpu(None, 125e12, 0.9e12),
    "a100": Gpu(None, 312e12, 1.555e12),
    "a10": Gpu(24 * GIB, 125e12, 0.6e12),
    "a40": Gpu(48 * GIB, 150e12, 0.696e12),
    "l40s": Gpu(48 * GIB, 362e12, 0.864e12),
    "h100": Gpu(80 * GIB, 989e12, 3.35e12),
    "h200": Gpu(141 * GIB, 989e12, 4.8e12),
    "b200": Gpu(180 * GIB, 2250e12, 8.0e12),
}


def gpu_of(cluster: Cluster) -> Gpu | None:
    """The GPU that ``slurm.gpu_type`` names (``nvidia_h100_80gb_hbm3`` as well as ``h100``)."""
    words = re.split(r"[^a-z0-9]+", (cluster.slurm.gpu_type or "").lower())
    return next((KNOWN[word] for word in words if word in KNOWN), None)


def memory_bytes(cluster: Cluster) -> int | None:
    """Memory of one GPU from ``gpu_memory`` or the type's name; None if neither gives it."""
    if cluster.gpu_memory is not None:
        return memory_of(cluster.gpu_memory)
    size = re.search(r"(\d+)gb?(?![a-z])", (cluster.slurm.gpu_type or "").lower())
    gpu = gpu_of(cluster)
    if gpu is None:
        return None
    return int(size[1]) * GIB if size else gpu.memory_bytes


def margin(needed: int) -> int:
    """Return the bytes to leave free in addition to an estimate.

    About 3 GiB are for the CUDA context and NCCL's buffers, and 10 % for fragmentation.
    """
    return 3 * GIB + needed // 10


def memory_of(text: str) -> int:
    """Bytes of a memory size in Slurm's notation; a number without a unit is in mebibytes."""
    unit = text[-1] if text[-1] in _UNITS else "M"
    return int(text.rstrip("KMGT")) * _UNITS[unit]


def binary_size(number: int) -> str:
    """Bytes to three digits, in binary units."""
    for unit, factor in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number} B"


REPEATED: Final[Mapping[str, float]] = {"off": 0, "selective": 1 / 6, "full": 1 / 3}
"""The share of a training step's FLOPs that activation checkpointing adds."""


class Checked(Protocol):
    """Settings or a draft of them."""

    @property
    def config(self) -> Config: ...
    @property
    def algorithm(self) -> Algorithm: ...


class CallCost(NamedTuple):
    """Floating-point operations of a call, and its seconds; None for an unknown GPU."""

    flops: int
    seconds: float | None


def placed_models(checked: Checked) -> dict[str, Placement]:
    """Return the placements of a configuration's models and of its generation (`placements`)."""
    return placements(
        checked.config, [use.role for use in uses_of(checked.config, checked.algorithm)]
    )


def memories(checked: Checked, *, certain: bool = False) -> dict[str, Memory]:
    """The memory of each model whose architecture is known.

    ``certain`` leaves out costs that depend on an assumed length of sequences.
    """
    config, algorithm = checked.config, checked.algorithm
    uses = {use.role: use for use in uses_of(config, algorithm)}
    placed = placed_models(checked)
    on = [(call, layout_of(call, list(placed))) for call in algorithm.calls(config)]
    estimates = {}
    for name, placement in placed.items():
        model = model_of(config, name)
        shape = shape_of(model)
        if shape is None:
            continue
        methods = {call.method for call, layout in on if layout == name}
        use = uses.get(name) or RoleUse(name, trained=False)
        lengths = lengths_of(config, algorithm, shape)
        if certain and lengths is not None and lengths.assumed:
            lengths = replace(lengths, longest=max(lengths.new_tokens, 1))
        demand = MemoryDemand(
            model=model,
            shape=shape,
            allocation=placement.allocation,
            head=use.head,
            trained=use.trained,
            computes=bool(methods - {Method.GENERATE}),
            generates=Method.GENERATE in methods
            and not (name == ROLLOUTS and config.rollout.servers),
            lengths=lengths,
            minibatches=algorithm.minibatches if use.trained else 1,
            replays_experts=name in ("actor", ROLLOUTS) and replays_experts(checked),
            cache_bytes=config.rollout.episode.cache_bytes,
            copies=config.checkpoint.asynchronous,
        )
        estimates[name] = estimate(demand)
    return estimates


def replays_experts(checked: Checked) -> bool:
    """Whether generation records experts, which the actor's calls replay."""
    return checked.config.rollout.replay_experts and checked.algorithm.replays


def cost(checked: Checked, call: Call, placed: dict[str, Placement]) -> CallCost | None:
    """Return the cost of a call over all sequences of a step at full length.

    Return None for a call without a model, or if the architecture or the lengths are unknown.
    """
    name = layout_of(call, list(placed))
    if name is None or name not in placed:
        return None
    config, algorithm = checked.config, checked.algorithm
    model = model_of(config, name)
    shape = shape_of(model)
    lengths = lengths_of(config, algorithm, shape)
    if shape is None or lengths is None:
        return None
    uses = uses_of(config, algorithm)
    use = next((use for use in uses if use.role == call.role), RoleUse(name, False))
    frozen = model.lora is not None
    flops = call_flops(shape, use.head, call.method, lengths, algorithm.epochs, frozen=frozen)
    gpu = gpu_of(config.cluster)
    elsewhere = name == ROLLOUTS and bool(config.rollout.servers)
    if gpu is None or config.cluster.gpus_per_worker == 0 or elsewhere:
        return CallCost(flops, None)
    again = REPEATED[model.recompute] if call.method is Method.TRAIN_STEP else 0
    seconds = compute_seconds(round(flops * (1 + again)), len(placed[name].ranks), gpu)
    if call.method is Method.GENERATE:
        read = _decoding_bytes(shape, placed[name], model, lengths)
        seconds = max(seconds, decode_seconds(lengths.new_tokens, read, gpu))
    return CallCost(flops, seconds)


def _decoding_bytes(shape: ModelShape, placed: Placement, model: Model, lengths: Lengths) -> float:
    """Return the bytes that a rank reads to generate one token of each of its sequences.

    They are the weights, and half of the final keys and values on average.
    """
    allocation = placed.allocation
    sequences = -(-lengths.sequences // allocation.sizes["dp"])
    cache = sequences * lengths.longest * kv_bytes_per_token(shape, allocation, model.dtype)
    return whole_weights(shape, allocation, model.dtype) + cache / 2


UTILIZATION: Final = 0.4
"""Model FLOPs utilization that training is assumed to reach."""
BACKWARD: Final = 2
"""Cost of a backward pass in forward passes."""


def forward_flops_per_token(shape: ModelShape, head: Head) -> int:
    """Operations of the matrix products with the parameters that are active for a token.

    The embedding lookup is free.
    """
    attention = 2 * shape.hidden * (shape.queries + shape.keys)
    dense = shape.mlp_matrices * shape.hidden * shape.inner
    routed = shape.experts_per_token * shape.expert_inner + shape.shared_inner
    sparse = shape.mlp_matrices * shape.hidden * routed + shape.hidden * shape.experts
    plain = shape.layers - shape.expert_layers
    outputs = shape.vocabulary if head == "lm" else 1
    layers = shape.layers * attention + plain * dense + shape.expert_layers * sparse
    return 2 * (layers + shape.hidden * outputs)


def attention_flops(shape: ModelShape, length: int) -> int:
    """Operations of the scores and the weighted sums of one sequence."""
    return 4 * shape.layers * shape.queries * (length * (length + 1) // 2)


def call_flops(
    shape: ModelShape,
    head: Head,
    method: Method,
    lengths: Lengths,
    passes: int,
    *,
    frozen: bool = False,
) -> int:
    """Return the operations for all sequences of a step at full length.

    A train_step makes ``passes`` passes over them. Weights that are ``frozen`` under adapters need
    no gradients.
    """
    total = lengths.sequences * forward_flops(shape, head, lengths.longest)
    if method is Method.GENERATE:  # an item's prompt is read once
        prompt = lengths.longest - lengths.new_tokens
        total -= (lengths.sequences - lengths.sequences // lengths.group) * forward_flops(
            shape, head, prompt
        )
    if method is Method.TRAIN_STEP:
        tokens = lengths.sequences * lengths.longest * int(frozen)
        total = total * (1 + BACKWARD) - tokens * forward_flops_per_token(shape, head)
        total *= passes
    return total


def forward_flops(shape: ModelShape, head: Head, length: int) -> int:
    """Operations of a forward pass over one sequence."""
    return length * forward_flops_per_token(shape, head) + attention_flops(shape, length)


def compute_seconds(flops: int, gpus: int, gpu: Gpu) -> float:
    return flops / (gpus * gpu.flops_per_s * UTILIZATION)


def decode_seconds(new_tokens: int, bytes_per_token: float, gpu: Gpu) -> float:
    """Return the memory-bandwidth bound in seconds.

    Each generated token reads a rank's weights, keys and values once.
    """
    return new_tokens * bytes_per_token / gpu.bytes_per_s
