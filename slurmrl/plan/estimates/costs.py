"""Memory of each model and FLOPs of each call of a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from slurmrl.config.schema import Config, Model
from slurmrl.graph.call import Call, Method, RoleUse
from slurmrl.plan.algorithms import Algorithm
from slurmrl.plan.estimates import hardware
from slurmrl.plan.estimates.flops import call_flops, compute_seconds, decode_seconds
from slurmrl.plan.estimates.lengths import Lengths, lengths_of
from slurmrl.plan.estimates.memory import Memory, MemoryDemand, estimate, kv_bytes_per_token
from slurmrl.plan.estimates.shape import ModelShape, shape_of
from slurmrl.plan.placement import TRAINERS, Placement, layout_of, model_of, placements


class Checked(Protocol):
    """Settings, or a draft of them."""

    @property
    def config(self) -> Config: ...
    @property
    def algorithm(self) -> Algorithm: ...


class Fullest(NamedTuple):
    """The GPU of the trainers' job with the highest estimate, and the models on it."""

    rank: int
    models: tuple[str, ...]
    size: int


class CallCost(NamedTuple):
    """``seconds`` is None where the GPU is unknown."""

    flops: int
    seconds: float | None


def memories(checked: Checked) -> dict[str, Memory]:
    """By model; those whose architecture is not known are left out."""
    config, algorithm = checked.config, checked.algorithm
    uses = {use.role: use for use in algorithm.roles()}
    placed = placements(config, uses)
    on = [(call, layout_of(call, list(placed))) for call in algorithm.calls(config)]
    found = {}
    for name, one in placed.items():
        model = model_of(config, name)
        shape = shape_of(model)
        if shape is None:
            continue
        methods = {call.method for call, layout in on if layout == name}
        use = uses.get(name) or RoleUse(name, trained=False)
        lengths = lengths_of(config, algorithm, shape)
        job = MemoryDemand(
            model=model,
            shape=shape,
            allocation=one.allocation,
            head=use.head,
            trained=use.trained,
            computes=bool(methods - {Method.GENERATE}),
            generates=Method.GENERATE in methods,
            lengths=lengths,
        )
        found[name] = estimate(job)
    return found


def fullest(placed: dict[str, Placement], sizes: dict[str, Memory]) -> Fullest:
    """Models on one GPU keep what stands there; calls run one after the other, so the largest of
    their passing needs counts once."""
    on: dict[int, list[str]] = {}
    for name, one in placed.items():
        if one.group == TRAINERS and name in sizes:
            for rank in one.ranks:
                on.setdefault(rank, []).append(name)
    best = Fullest(0, (), 0)
    for names in {tuple(names): rank for rank, names in sorted(on.items(), reverse=True)}.items():
        together, rank = names
        size = together_bytes([sizes[name] for name in together])
        if size > best.size:
            best = Fullest(rank, together, size)
    return best


def together_bytes(models: Sequence[Memory]) -> int:
    passing = (max(one.activations, one.kv_cache) for one in models)
    return sum(one.standing for one in models) + max(passing, default=0)


def standing_by_gpu(checked: Checked) -> Fullest:
    """The fullest GPU, of the trainers or of the servers."""
    placed = placements(checked.config, [use.role for use in checked.algorithm.roles()])
    return fullest(placed, memories(checked))


def cost(
    checked: Checked, call: Call, placed: dict[str, Placement], sizes: dict[str, Memory]
) -> CallCost | None:
    """A call over a whole step's sequences at full length; None where nothing is known."""
    name = layout_of(call, list(placed))
    if name is None or name not in placed:
        return None
    config, algorithm = checked.config, checked.algorithm
    model = model_of(config, name)
    shape = shape_of(model)
    lengths = lengths_of(config, algorithm, shape)
    if shape is None or lengths is None:
        return None
    use = next((use for use in algorithm.roles() if use.role == call.role), RoleUse(name, False))
    passes = int(getattr(algorithm, "n_epochs", 1))
    flops = call_flops(shape, use.head, call.method, lengths, passes)
    gpu = hardware.gpu_of(config.cluster)
    if gpu is None or config.cluster.gpus_per_worker == 0:
        return CallCost(flops, None)
    again = call.method is Method.TRAIN_STEP and model.recompute == "full"
    seconds = compute_seconds(flops * (4 if again else 3) // 3, len(placed[name].ranks), gpu)
    if call.method is Method.GENERATE:
        read = _decoding_bytes(shape, placed[name], model, lengths, sizes[name])
        seconds = max(seconds, decode_seconds(lengths.new_tokens, read, gpu))
    return CallCost(flops, seconds)


def _decoding_bytes(
    shape: ModelShape, placed: Placement, model: Model, lengths: Lengths, memory: Memory
) -> float:
    """Bytes that a rank reads for a token of each of its sequences: weights, and on average half of
    the keys and values."""
    allocation = placed.allocation
    sequences = -(-lengths.sequences // allocation.sizes["dp"])
    cache = sequences * lengths.longest * kv_bytes_per_token(shape, allocation, model.dtype)
    whole = memory.kv_cache - cache
    return max(whole, 0) + memory.weights * (whole <= 0) + cache / 2
