"""Memory of each model and FLOPs of each call of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol

from slurmrl.config.schema import Config, Model
from slurmrl.graph.call import Call, Method, RoleUse
from slurmrl.plan.algorithms import Algorithm, uses_of
from slurmrl.plan.estimates import hardware
from slurmrl.plan.estimates.flops import call_flops, compute_seconds, decode_seconds
from slurmrl.plan.estimates.lengths import Lengths, lengths_of
from slurmrl.plan.estimates.memory import (
    Memory,
    MemoryDemand,
    estimate,
    kv_bytes_per_token,
    whole_weights,
)
from slurmrl.plan.estimates.shape import ModelShape, shape_of
from slurmrl.plan.placement import (
    ROLLOUTS,
    Placement,
    layout_of,
    model_of,
    offloaded,
    placements,
)
from slurmrl.worlds import TRAINERS

REPEATED: Final[Mapping[str, float]] = {"off": 0, "selective": 1 / 6, "full": 1 / 3}
"""The share of a training step's FLOPs that activation checkpointing adds."""


class Checked(Protocol):
    """Settings or a draft of them."""

    @property
    def config(self) -> Config: ...
    @property
    def algorithm(self) -> Algorithm: ...


@dataclass(frozen=True)
class Fullest:
    """The GPU of the trainers' job with the highest estimate."""

    rank: int = 0
    models: tuple[str, ...] = ()
    """The models on it."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes of what is on it at that time: weights, gradients, optimizer and, of one model at a
    time, activations or kv_cache."""

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


class CallCost(NamedTuple):
    """Floating-point operations of a call, and its seconds; None for an unknown GPU."""

    flops: int
    seconds: float | None


def memories(checked: Checked, *, certain: bool = False) -> dict[str, Memory]:
    """The memory of each model whose architecture is known. ``certain`` counts only what does not
    depend on an assumed length of sequences."""
    config, algorithm = checked.config, checked.algorithm
    uses = {use.role: use for use in uses_of(config, algorithm)}
    placed = placements(config, uses)
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
            cache_bytes=config.rollout.episode.cache_bytes,
        )
        estimates[name] = estimate(demand)
    return estimates


def fullest(config: Config, placed: dict[str, Placement], sizes: dict[str, Memory]) -> Fullest:
    """The GPU with the highest estimate. Calls run one after the other, so of the models' transient
    memory only the largest counts. A model that is offloaded between calls is on the GPU only
    during its own, and while weights move from or to it."""
    on: dict[int, list[str]] = {}
    for name, placement in placed.items():
        if placement.group == TRAINERS and name in sizes:
            for rank in placement.ranks:
                on.setdefault(rank, []).append(name)
    best = Fullest()
    away = offloaded(config, placed)
    first_ranks = {tuple(names): rank for rank, names in sorted(on.items(), reverse=True)}
    for names, rank in first_ranks.items():
        uses: list[tuple[str, ...]] = [(name,) for name in names]
        if ROLLOUTS in names and "actor" in names:
            uses.append(("actor", ROLLOUTS))
        for used in uses:
            here = {name: sizes[name] for name in names if name in used or name not in away}
            parts = _calling(here, *used) if len(used) == 1 else _moving(here, config)
            candidate = Fullest(rank, tuple(here), parts)
            if candidate.size > best.size:
                best = candidate
    return best


def _calling(models: Mapping[str, Memory], name: str) -> dict[str, int]:
    """Bytes during the largest call of a model."""
    busy = models[name]
    largest, size = f"activations of {name}", busy.computing
    gradients = sum(0 if memory.frees_gradients else memory.gradients for memory in models.values())
    if busy.kv_cache > size:
        largest, size = f"kv_cache of {name}", busy.kv_cache
    elif busy.frees_gradients:
        gradients, size = gradients + busy.gradients, busy.activations
    return {**_standing(models), "gradients": gradients, largest: size}


def _moving(models: Mapping[str, Memory], config: Config) -> dict[str, int]:
    """Bytes while weights move; no rank stages more than it holds."""
    gradients = sum(0 if memory.frees_gradients else memory.gradients for memory in models.values())
    held = models["actor"].weights + models[ROLLOUTS].weights
    staging = min(config.transfer.staging_mib * 2**20, held)
    return {**_standing(models), "gradients": gradients, "buffers of moves": staging}


def _standing(models: Mapping[str, Memory]) -> dict[str, int]:
    return {
        "weights": sum(memory.weights for memory in models.values()),
        "gradients": 0,
        "optimizer": sum(memory.optimizer for memory in models.values()),
    }


def fullest_gpu(checked: Checked, *, certain: bool = False) -> Fullest:
    """The trainers' GPU with the highest estimate; ``certain`` as in `memories`."""
    uses = uses_of(checked.config, checked.algorithm)
    placed = placements(checked.config, [use.role for use in uses])
    return fullest(checked.config, placed, memories(checked, certain=certain))


def cost(checked: Checked, call: Call, placed: dict[str, Placement]) -> CallCost | None:
    """The cost of a call over all sequences of a step at full length; None for a call without a
    model, or where the architecture or the lengths are unknown."""
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
    gpu = hardware.gpu_of(config.cluster)
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
    """Bytes that a rank reads to generate one token of each of its sequences: the weights, and half
    of the final keys and values on average."""
    allocation = placed.allocation
    sequences = -(-lengths.sequences // allocation.sizes["dp"])
    cache = sequences * lengths.longest * kv_bytes_per_token(shape, allocation, model.dtype)
    return whole_weights(shape, allocation, model.dtype) + cache / 2
