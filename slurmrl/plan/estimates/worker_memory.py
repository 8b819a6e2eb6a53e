"""Estimates of GPU memory in the trainers' job and in servers, and of a worker's host memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Final, NamedTuple

from slurmrl.config.allocation import parse
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.schema import Config
from slurmrl.plan.algorithms import uses_of
from slurmrl.plan.dataflow import RoleUse
from slurmrl.plan.engine_rules import last_value
from slurmrl.plan.estimates import call_costs
from slurmrl.plan.estimates.added_sizes import (
    adapted_parameters,
    adapter_parameters,
    on_host_of_server,
)
from slurmrl.plan.estimates.call_costs import (
    Checked,
    margin,
    memories,
    placed_models,
    replays_experts,
)
from slurmrl.plan.estimates.hardware import GIB
from slurmrl.plan.estimates.memory import BYTES, FLOAT32, Memory, kv_bytes_per_token, whole_weights
from slurmrl.plan.estimates.pass_seconds import SAME, Narrower
from slurmrl.plan.estimates.server_types import narrower_types, shape_on, staged_weights
from slurmrl.plan.estimates.shape import parameters, shape_of
from slurmrl.plan.model import GroupPlan
from slurmrl.plan.placement import ROLLOUTS, Placement, model_of, offloaded
from slurmrl.run.reports import TRAINERS

SERVER: Final = "server"


@dataclass(frozen=True)
class Fullest:
    """The GPU of the trainers' job with the highest estimate."""

    rank: int = 0
    models: tuple[str, ...] = ()
    """Names of the models on the GPU."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Mapping from content to bytes at the maximum: weights, gradients, optimizer and a server. One
    model also has activations and recorded experts, or kv_cache."""

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def margin(self) -> int:
        """Bytes that must stay free in addition. A server's part includes its own margin."""
        return call_costs.margin(self.size - self.parts.get(SERVER, 0))


class _Use(NamedTuple):
    """The contents of a GPU during a call, a move or a generation, without its server."""

    models: tuple[str, ...]
    parts: dict[str, int]
    awake: bool
    """Whether the server on the GPU keeps its memory during this use."""


@dataclass(frozen=True)
class TrainersGpus:
    """The models on the GPUs of the trainers' job.

    Calls run one after the other, so only the largest transient memory of a model counts. An
    offloaded model is on the GPU only during its own calls and during moves of its weights. A
    worker holds the weights of a server only during their move.
    """

    config: Config
    placed: Mapping[str, Placement]
    sizes: Mapping[str, Memory]
    limit: int | None = None
    """Bytes of a GPU's memory; None if unknown."""

    @property
    def has_servers(self) -> bool:
        """Whether the run starts servers on these GPUs."""
        rollout = self.placed.get(ROLLOUTS)
        return self._serves and rollout is not None and not self.config.rollout.servers

    @property
    def _serves(self) -> bool:
        rollout = self.placed.get(ROLLOUTS)
        return (
            rollout is not None
            and BACKENDS[rollout.allocation.backend].serves
            and rollout.group == TRAINERS
            and ROLLOUTS in self.sizes
        )

    @property
    def _away(self) -> frozenset[str]:
        return offloaded(self.config, self.placed)

    @property
    def server_sleeps(self) -> bool:
        """Whether servers free their memory while other models compute. This requires GPUs."""
        return ROLLOUTS in self._away and self.config.cluster.gpus_per_worker != 0

    def fullest(self) -> Fullest:
        """Return the GPU with the highest estimate including its margin."""
        best = Fullest()
        share = self.server_bytes() if self.has_servers else 0
        for rank, names in self._first_ranks():
            for use in self._uses(names):
                parts, models = use.parts, use.models
                if self.has_servers and ROLLOUTS in names:
                    own = {SERVER: share} if use.awake else {"sleeping server": SLEEPING}
                    parts, models = {**parts, **own}, (*models, *([ROLLOUTS] * use.awake))
                candidate = Fullest(rank, models, parts)
                if candidate.size + candidate.margin > best.size + best.margin:
                    best = candidate
        return best

    def server_bytes(self) -> int:
        """Return the bytes of each GPU that a server uses.

        The result is the share that the user sets, or else all memory that the other models leave
        free, but at least the server's minimum. If a GPU's size is unknown, the result has room for
        the weights and all sequences of a step.
        """
        memory, limit = self.sizes[ROLLOUTS], self.limit
        if limit is None:
            return memory.weights + memory.kv_cache
        own = own_share(self.config.rollout.server_args)
        if own is not None:
            return round(own * limit)
        return max(self.left_for_server(limit), least(memory, limit))

    def left_for_server(self, limit: int) -> int:
        """Return the bytes, maybe negative, that other models leave on the server's fullest GPU."""
        sizes = [
            sum(use.parts.values())
            for _, names in self._first_ranks()
            for use in self._uses(names)
            if ROLLOUTS in names and use.awake
        ]
        most = max(sizes)
        return limit - most - call_costs.margin(most)

    def _first_ranks(self) -> list[tuple[int, tuple[str, ...]]]:
        """Return the first GPU with each set of models, and the names of these models."""
        on: dict[int, list[str]] = {}
        for name, placement in self.placed.items():
            if placement.group == TRAINERS and name in self.sizes:
                for rank in placement.ranks:
                    on.setdefault(rank, []).append(name)
        first = {tuple(names): rank for rank, names in sorted(on.items(), reverse=True)}
        return [(rank, names) for names, rank in first.items()]

    def _uses(self, names: Collection[str]) -> Iterator[_Use]:
        served = self._serves and ROLLOUTS in names
        models = [name for name in names if not served or name != ROLLOUTS]
        awake = not self.server_sleeps
        for name in models:
            here = self._here(models, name)
            yield _Use(tuple(here), _calling(here, name), awake)
        if ROLLOUTS in names and (served or "actor" in names):
            here = self._here(models, "actor", *([] if served else [ROLLOUTS]))
            yield _Use(tuple(here), self._moving(here), awake)
        if served and self.has_servers:
            here = self._here(models)
            yield _Use(tuple(here), _resident(here), awake=True)

    def _here(self, models: Collection[str], *used: str) -> dict[str, Memory]:
        """Return the models that are on the GPU while the models ``used`` are in use."""
        return {name: self.sizes[name] for name in models if name in used or name not in self._away}

    def _moving(self, models: Mapping[str, Memory]) -> dict[str, int]:
        """Return the bytes during a move of weights to the generating engine.

        No rank needs larger buffers than its weights.
        """
        moved, parts = _arriving(self.config, self.placed[ROLLOUTS]), _resident(models)
        if ROLLOUTS not in models:
            parts["weights"] += moved
        held = moved + (models["actor"].weights if "actor" in models else 0)
        return {**parts, "buffers of moves": min(self.config.transfer.staging_mib * 2**20, held)}


def _calling(models: Mapping[str, Memory], name: str) -> dict[str, int]:
    """Return a mapping from content to bytes during the largest call of a model."""
    busy, parts = models[name], _resident(models)
    if busy.kv_cache > busy.computing:
        return {**parts, f"kv_cache of {name}": busy.kv_cache}
    if busy.frees_gradients:
        parts["gradients"] += busy.gradients
    passing = {f"activations of {name}": busy.activations}
    return {**parts, **passing, **({"recorded experts": busy.experts} if busy.experts else {})}


def _narrower(config: Config, rollout: Placement) -> Narrower:
    """Return the factors of the types in which servers store the actor."""
    if (shape := shape_of(config.actor)) is None:
        return SAME
    shape = shape_on(shape, rollout.allocation)
    return narrower_types(config, shape, rollout.allocation, config.actor.dtype)


def _arriving(config: Config, rollout: Placement) -> int:
    """Return the bytes of weights that a rank of the generating engine receives."""
    if (shape := shape_of(config.actor)) is None:
        return 0
    shape = shape_on(shape, rollout.allocation)
    return round(whole_weights(shape, rollout.allocation, config.actor.dtype))


def _resident(models: Mapping[str, Memory]) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizers that models keep between calls."""
    kept = (0 if memory.frees_gradients else memory.gradients for memory in models.values())
    return {
        "weights": sum(memory.weights for memory in models.values()),
        "gradients": sum(kept),
        "optimizer": sum(memory.optimizer for memory in models.values()),
    }


def trainers_gpus(
    checked: Checked, *, certain: bool = False, limit: int | None = None
) -> TrainersGpus:
    """Return the trainers' GPUs of a configuration. `memories` explains ``certain``.

    ``limit`` is the size of a GPU in bytes, by default the size of the cluster's GPUs if known.
    """
    placed = placed_models(checked)
    known = call_costs.memory_bytes(checked.config.cluster) if limit is None else limit
    if checked.config.cluster.gpus_per_worker == 0:
        known = None
    return TrainersGpus(checked.config, placed, memories(checked, certain=certain), known)


def fullest_gpu(checked: Checked, *, certain: bool = False, limit: int | None = None) -> Fullest:
    """Return the trainers' GPU with the highest estimate (for arguments, see `trainers_gpus`)."""
    return trainers_gpus(checked, certain=certain, limit=limit).fullest()


def share_of_server(checked: Checked, gpu_bytes: int) -> int | None:
    """Return the bytes of each GPU for a server that the run starts.

    Return None without such a server, or if its arguments set the share. Assumed lengths of
    sequences count only if they leave enough memory to the server.
    """
    if own_share(checked.config.rollout.server_args) is not None:
        return None
    for certain in (False, True):
        gpus = trainers_gpus(checked, certain=certain, limit=gpu_bytes)
        if not gpus.has_servers:
            return None
        share = gpus.left_for_server(gpu_bytes)
        if share >= least(gpus.sizes[ROLLOUTS], gpu_bytes):
            break
    return share


SLEEPING: Final = 2 * GIB
"""Bytes of CUDA contexts, NCCL's buffers and code that a sleeping server keeps on each GPU."""
LEAST_COMPUTING: Final = 2 * GIB
SHARES: Final = ("--mem-fraction-static", "--gpu-memory-utilization")
"""Arguments that set a server's share of a GPU."""


def computing(gpu_bytes: int) -> int:
    """Return the bytes that a server needs in addition to weights and caches.

    These bytes hold activations of a prefill batch, logits and CUDA graphs. SGLang and vLLM choose
    the batch size by the size of the GPU.
    """
    return max(LEAST_COMPUTING, gpu_bytes // 10)


def least(memory: Memory, gpu_bytes: int) -> int:
    """Return the minimum bytes of a GPU with which a server can serve the longest sequence."""
    return memory.weights + memory.sequence + computing(gpu_bytes)


def share_in_task(arguments: Sequence[str], gpu_bytes: int) -> int:
    """Return the bytes of each GPU that a server uses if no other process uses the GPU.

    Such a server needs no room for arriving weights. The server uses all memory except a margin, or
    the share that the user's arguments set.
    """
    own = own_share(arguments)
    return gpu_bytes - margin(0) if own is None else round(own * gpu_bytes)


def own_share(arguments: Sequence[str]) -> float | None:
    """Return the share of a GPU that the user's arguments give a server; None if they set none."""
    value = last_value(arguments, SHARES)
    try:
        return None if value is None else float(value)
    except ValueError:
        return None  # The server rejects such a value.


SGLANG: Final = "sglang"
"""Name of the only kind of server that reports experts."""
ONE_RANK: Final = parse("fsdp:d1")
"""The layout of weights that are not split."""
WORKER: Final = 8 * GIB
"""Bytes of host memory of a worker with a GPU, without its models. They hold Python, torch, a CUDA
context, NCCL's buffers, a tokenized dataset, and a part of the host's agent and master."""
ROUNDED: Final = 2
"""Factor of page-locked weights and gradients of ``cpu_offload`` if torch rounds each tensor up to
a power of two."""
EXACT_FROM: Final = (2, 13)
"""First release of torch whose rounding can be disabled (``engines/host.py``)."""


VERSIONS: Final = 2
"""Number of complete copies of the weights in the host memory of a rank while its server loads a
new version, unless the server has slept. A GPU of a rollout task needs the same number of
copies."""


def slot_bytes(checked: Checked, group: GroupPlan) -> int | None:
    """Return the host memory in bytes that jobs of a group need for each worker with a GPU.

    If rollout tasks run in the trainers' job, a GPU counts as a worker. Return None if an
    architecture is unknown.
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
    placed = placed_models(checked)
    away, sizes = offloaded(checked.config, placed), memories(checked)
    on_rank: dict[int, int] = {}
    loading = 0
    for name, placement in placed.items():
        if placement.group != TRAINERS or name not in uses:
            continue
        if (memory := sizes.get(name)) is None:
            return None
        size = memory.host + _rounding(checked.config) * memory.locked
        if name in away:
            size += memory.standing
        if name == "actor":
            size += round(_published_bytes(checked.config) / len(placement.ranks))
        for rank in placement.ranks:
            on_rank[rank] = on_rank.get(rank, 0) + size
        loading = max(loading, _loading_bytes(checked.config, uses[name], placement))
    rollout = placed.get(ROLLOUTS)
    own = not checked.config.rollout.servers
    if rollout is not None and BACKENDS[rollout.allocation.backend].serves and own:
        size = rollout.allocation.instance_size
        versions = 1 if ROLLOUTS in away else VERSIONS
        recorded = server_experts_bytes(checked)
        narrower = _narrower(checked.config, rollout)
        arriving = _arriving(checked.config, rollout)
        staged = round(staged_weights(arriving, narrower, versions=versions))
        for number, rank in enumerate(rollout.ranks if rollout.group == TRAINERS else ()):
            copies = 0 if number % size else size * staged
            on_rank[rank] = on_rank.get(rank, 0) + copies + recorded
    return WORKER + max(max(on_rank.values(), default=0), loading)


def task_bytes(checked: Checked) -> int | None:
    """Return the host memory in bytes of the worker of a rollout task with a GPU.

    The worker holds its copy of the weights, and a second copy while a new version arrives. With
    adapters, it holds the frozen weights once and the merged versions of adapted weights twice.
    Return None if the actor's architecture is unknown.
    """
    actor = checked.config.actor
    shape = shape_of(actor)
    if shape is None:
        return None
    whole, kept = whole_weights(shape, ONE_RANK, actor.dtype), WORKER
    if (rollout := _rollouts(checked)) is not None:
        kept += rollout.allocation.instance_size * server_experts_bytes(checked)
        kept += round(staged_weights(whole, _narrower(checked.config, rollout), versions=0))
    if actor.lora is None:
        return kept + round(VERSIONS * whole)
    merged = VERSIONS * adapted_parameters(actor, shape) * BYTES[actor.dtype]
    return kept + round(whole + merged + VERSIONS * version_size(checked.config))


def server_experts_bytes(checked: Checked) -> int:
    """Return the bytes of host memory that an SGLang server needs per GPU for recorded experts.

    Return 0 if the run's servers record no experts.
    """
    config = checked.config
    rollout, shape = _rollouts(checked), shape_of(config.actor)
    if rollout is None or rollout.allocation.backend != SGLANG or config.rollout.servers:
        return 0
    if shape is None or not replays_experts(checked):
        return 0
    memory, limit = memories(checked)[ROLLOUTS], call_costs.memory_bytes(config.cluster)
    cache = memory.kv_cache
    if rollout.group == TRAINERS:
        cache = trainers_gpus(checked).server_bytes() - memory.weights
    elif limit is not None:
        cache = share_in_task(config.rollout.server_args, limit) - memory.weights
    each = kv_bytes_per_token(shape, rollout.allocation, model_of(config, ROLLOUTS).dtype)
    each *= _narrower(config, rollout).cache
    return on_host_of_server(shape, max(cache, 0) / each)


def _rollouts(checked: Checked) -> Placement | None:
    """Return the placement of a separate engine for generation; None without such an engine."""
    return placed_models(checked).get(ROLLOUTS)


def version_size(config: Config) -> float:
    """Return the bytes of a complete weight version.

    A version has the actor's weights in the type of generation, or only its adapters in float32.
    Return 0 if the actor's architecture is unknown.
    """
    actor, shape = config.actor, shape_of(config.actor)
    if shape is None:
        return 0.0
    if actor.lora is None:
        return whole_weights(shape, ONE_RANK, actor.dtype)
    return FLOAT32 * adapter_parameters(actor, shape, ONE_RANK, "lm")


def _published_bytes(config: Config) -> float:
    """Return the total bytes of the copies that all ranks keep for weight versions.

    Deltas need the previous copy in addition to the newest copy.
    """
    publish = config.rollout.publish
    return 0.0 if publish is None else publish.copies * version_size(config)


def _rounding(config: Config) -> int:
    """Return the factor by which torch rounds. A container may have a different torch."""
    try:
        release = tuple(int(part) for part in metadata.version("torch").split(".")[:2])
    except metadata.PackageNotFoundError:
        return ROUNDED
    return ROUNDED if config.cluster.slurm.container or release < EXACT_FROM else 1


def _loading_bytes(config: Config, use: RoleUse, placed: Placement) -> int:
    """Return the bytes to load a model of transformers, which is built unsharded on the CPU."""
    model = model_of(config, use.role)
    shape = shape_of(model)
    if model.implementation != "hf" or shape is None:
        return 0
    width = FLOAT32 if use.trained else BYTES[model.dtype]
    whole = replace(placed.allocation, sizes={**placed.allocation.sizes, "tp": 1})
    return round(parameters(shape, whole, use.head).total * width)
