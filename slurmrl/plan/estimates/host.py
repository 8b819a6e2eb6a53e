"""Estimate of the host memory of a worker."""

from __future__ import annotations

from importlib import metadata
from typing import Final

from slurmrl.config.allocation import parse
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.schema import Config, Lora, Model
from slurmrl.plan.algorithms import uses_of
from slurmrl.plan.dataflow import RoleUse
from slurmrl.plan.estimates import hardware
from slurmrl.plan.estimates.costs import Checked, memories, replays_experts
from slurmrl.plan.estimates.gpus import share_in_task, trainers_gpus
from slurmrl.plan.estimates.hardware import GIB
from slurmrl.plan.estimates.memory import BYTES, SHARDED, kv_bytes_per_token, on_host_of_server
from slurmrl.plan.estimates.shape import (
    ModelShape,
    adapted_parameters,
    adapter_parameters,
    parameters,
    shape_of,
    shard_parameters,
    trained_shard,
)
from slurmrl.plan.model import GroupPlan
from slurmrl.plan.placement import ROLLOUTS, Placement, model_of, offloaded, placements
from slurmrl.run.reports import TRAINERS

SGLANG: Final = "sglang"
"""The only servers that report experts."""
WORKER: Final = 8 * GIB
"""Of a worker with a GPU, without its models: Python, torch and its libraries, the CUDA context,
NCCL's buffers, a tokenized dataset, and its part of the host's agent and master."""
ROUNDED: Final = 2
"""Factor on page-locked weights and gradients of ``cpu_offload`` where torch rounds each up to a
power of two."""
EXACT_FROM: Final = (2, 13)
"""The first release of torch that can be kept from rounding (``engines/host.py``)."""


VERSIONS: Final = 2
"""Whole copies of the weights in the host memory of the rank that keeps a server, while that gets
a new version; the one before is gone if the server has slept. As many in that of a rollout task."""


def slot_bytes(checked: Checked, group: GroupPlan) -> int | None:
    """Return the host memory in bytes that jobs of a group need for each worker with a GPU.

    If rollout tasks run next to the trainers, it is for each GPU. Return None if an architecture is
    unknown.
    """
    task = task_bytes(checked) if group.elastic or group.tasks_per_host else 0
    if group.elastic:
        return task
    worker = worker_bytes(checked)
    if worker is None or task is None:
        return None
    return max(worker, -(-task // group.slots_per_task))


def worker_bytes(checked: Checked) -> int | None:
    """Return the host memory in bytes of a trainers' worker with a GPU.

    Return None if a model's architecture is unknown.
    """
    uses = {use.role: use for use in uses_of(checked.config, checked.algorithm)}
    placed = placements(checked.config, uses)
    away, sizes = offloaded(checked.config, placed), memories(checked)
    on_rank: dict[int, int] = {}
    loading = 0
    for name, placement in placed.items():
        if placement.group != TRAINERS or name not in uses:
            continue
        size = _model_bytes(checked.config, uses[name], placement)
        if size is None:
            return None
        if name in away:
            size += sizes[name].standing
        for rank in placement.ranks:
            on_rank[rank] = on_rank.get(rank, 0) + size
        loading = max(loading, _loading_bytes(checked.config, uses[name]))
    rollout = placed.get(ROLLOUTS)
    own = not checked.config.rollout.servers
    if rollout is not None and BACKENDS[rollout.allocation.backend].serves and own:
        size = rollout.allocation.instance_size
        versions = 1 if ROLLOUTS in away else VERSIONS
        recorded = server_experts_bytes(checked)
        for number, rank in enumerate(rollout.ranks if rollout.group == TRAINERS else ()):
            copies = 0 if number % size else versions * size * sizes[ROLLOUTS].weights
            on_rank[rank] = on_rank.get(rank, 0) + copies + recorded
    return WORKER + max(max(on_rank.values(), default=0), loading)


def task_bytes(checked: Checked) -> int | None:
    """Return the host memory in bytes of the worker of a rollout task with a GPU.

    It holds its copy of the weights, twice while a new version comes. With adapters, only the
    adapted weights are held twice, in addition to their frozen originals; all other weights have
    one copy. Return None if the actor's architecture is unknown.
    """
    actor = checked.config.actor
    shape = shape_of(actor)
    if shape is None:
        return None
    whole, kept = _whole_bytes(checked.config, shape), WORKER
    if (rollout := _rollouts(checked)) is not None:
        kept += rollout.allocation.instance_size * server_experts_bytes(checked)
    if actor.lora is None:
        return kept + round(VERSIONS * whole)
    merged = VERSIONS * adapted_parameters(shape, actor.lora) * BYTES[actor.dtype]
    return kept + round(whole + merged + VERSIONS * _adapter_bytes(shape, actor.lora))


def server_experts_bytes(checked: Checked) -> int:
    """Return the host memory in bytes of an SGLang server for recorded experts, for each GPU.

    Return 0 if none of the run's servers records any.
    """
    config = checked.config
    rollout, shape = _rollouts(checked), shape_of(config.actor)
    if rollout is None or rollout.allocation.backend != SGLANG or config.rollout.servers:
        return 0
    if shape is None or not replays_experts(checked):
        return 0
    memory, limit = memories(checked)[ROLLOUTS], hardware.memory_bytes(config.cluster)
    cache = memory.kv_cache
    if rollout.group == TRAINERS:
        cache = trainers_gpus(checked).server_bytes() - memory.weights
    elif limit is not None:
        cache = share_in_task(config.rollout.server_args, limit) - memory.weights
    each = kv_bytes_per_token(shape, rollout.allocation, model_of(config, ROLLOUTS).dtype)
    return on_host_of_server(shape, max(cache, 0) / each)


def _rollouts(checked: Checked) -> Placement | None:
    """Where completions are made, if not by the trainers' actor."""
    config = checked.config
    placed = placements(config, [use.role for use in uses_of(config, checked.algorithm)])
    return placed.get(ROLLOUTS)


def _adapter_bytes(shape: ModelShape, lora: Lora) -> float:
    """All adapters, which are float32."""
    return 4 * adapter_parameters(shape, parse("fsdp:d1"), lora, "lm")


def _whole_bytes(config: Config, shape: ModelShape) -> float:
    """All weights in the precision in which they generate."""
    return parameters(shape, parse("fsdp:d1"), "lm").total * BYTES[config.actor.dtype]


def _model_bytes(config: Config, use: RoleUse, placed: Placement) -> int | None:
    """Return the bytes of a model that its ranks keep in host memory.

    They are the copies of a trained model for checkpoints and weight versions, and the tensors that
    ``cpu_offload`` moves: weights, and for a trained model gradients and moments.
    """
    model = model_of(config, use.role)
    shape = shape_of(model)
    if shape is None:
        return None
    own = shard_parameters(shape, placed.allocation, use.head)
    trained = trained_shard(model, shape, placed.allocation, use.head)
    moments, size = len(model.optimizer.moments), 0.0
    if use.trained and config.checkpoint.asynchronous:
        size += 4 * trained * (1 + moments)
    elif model.ema is not None and config.checkpoint.asynchronous:
        size += 4 * own
    if use.role == "actor":
        size += _published_bytes(config, shape) / len(placed.ranks)
    if model.cpu_offload and placed.allocation.backend in SHARDED:
        size += _rounding(config) * _weight_width(model, use) * own
        if use.trained:
            size += 4 * trained * (_rounding(config) + moments)
        if use.trained and model.lora is not None:
            size += 4 * trained * _rounding(config)
    return round(size)


def _published_bytes(config: Config, shape: ModelShape) -> float:
    """Return the bytes of the copies that all ranks keep together for weight versions.

    They hold the weights, or only the adapters: the newest copy, and the previous one to find the
    changes since.
    """
    publish, lora = config.rollout.publish, config.actor.lora
    if publish is None:
        return 0.0
    size = _whole_bytes(config, shape) if lora is None else _adapter_bytes(shape, lora)
    return publish.copies * size


def _weight_width(model: Model, use: RoleUse) -> int:
    """Bytes of an element of its weights."""
    return 4 if use.trained and model.lora is None else BYTES[model.dtype]


def _rounding(config: Config) -> int:
    """Of the torch that is installed here, as on the compute nodes; a container has its own."""
    try:
        release = tuple(int(part) for part in metadata.version("torch").split(".")[:2])
    except metadata.PackageNotFoundError:
        return ROUNDED
    return ROUNDED if config.cluster.slurm.container or release < EXACT_FROM else 1


def _loading_bytes(config: Config, use: RoleUse) -> int:
    """A model of transformers is built whole on the CPU before it is sharded."""
    model = model_of(config, use.role)
    shape = shape_of(model)
    if model.implementation != "hf" or shape is None:
        return 0
    placed = placements(config, [use.role])[use.role]
    width = 4 if use.trained else BYTES[model.dtype]
    return round(parameters(shape, placed.allocation, use.head).total * width)
