"""The report of ``slurmrl plan`` as plain values.

The report has a plan with its ranks, process groups, estimates, and the algorithm's settings. Ranks
and process groups depend only on the plan, so every process of a run computes the same tables.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TypeAlias, cast

from pydantic import BaseModel

from slurmrl.config.allocation import parse
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.schema import Model, role_key
from slurmrl.config.source import dotted, flat
from slurmrl.plan.checks.fit import Fit, padded_vocabulary
from slurmrl.plan.dataflow import Call, Method
from slurmrl.plan.estimates import call_costs
from slurmrl.plan.estimates.added_sizes import trained_shard
from slurmrl.plan.estimates.call_costs import MeanTokens
from slurmrl.plan.estimates.hardware import hardware_of
from slurmrl.plan.estimates.memory import Memory
from slurmrl.plan.estimates.shape import (
    ModelShape,
    as_long_as_rows,
    lengths_of,
    parameters,
    shape_of,
)
from slurmrl.plan.estimates.worker_memory import (
    fullest_gpu,
    server_experts_bytes,
    share_in_task,
    trainers_gpus,
    worker_bytes,
)
from slurmrl.plan.model import GroupPlan, ModelPlan, Plan
from slurmrl.plan.placement import ROLLOUTS, Placement, in_tasks, model_of
from slurmrl.plan.precision import generating
from slurmrl.plan.settings import Settings
from slurmrl.run.reports import TRAINERS
from slurmrl.tensors.parallel.topology import ProcessTopology


def report(settings: Settings, plan: Plan, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """Return the report of a plan, with additional ``warnings``."""
    sized = _sized(settings, plan)
    memories = call_costs.memories(sized)
    placed = call_costs.placed_models(settings)
    groups = process_groups(plan)
    return {
        "experiment": plan.experiment,
        "trial": plan.trial,
        "algorithm": in_force(settings),
        "one_pass": settings.algorithm.one_pass,
        "total_steps": settings.config.total_steps,
        "world_size": plan.trainers.world_size,
        "gpus": sum(group.workers * group.gpus_per_worker for group in plan.groups),
        "groups": [_group(plan, group) for group in plan.groups],
        "worker_host_bytes": worker_bytes(settings) if _uses_gpus(plan) else None,
        "experts_host_bytes": server_experts_bytes(settings) if _uses_gpus(plan) else 0,
        "models": {
            name: _model(settings, plan, model, memories.get(name))
            for name, model in plan.models.items()
        },
        "calls": _calls(_on_ranks(settings, plan), plan, placed),
        **_hardware(_on_ranks(settings, plan)),
        "episode": _episode(settings),
        "process_groups": [asdict(group) for group in groups],
        "process_group_counts": dict(Counter(use for group in groups for use in group.uses)),
        "memory": {
            **_fullest(sized, plan, placed.get(ROLLOUTS)),
            "longest_row": None if sized.config is settings.config else _longest(sized),
        },
        "warnings": [*_warnings(plan), *warnings],
        "notes": list(settings.notes),
        "missing": [str(problem) for problem in settings.missing],
    }


def figures(settings: Settings, plan: Plan) -> dict[str, Any]:
    """Return only the estimates of a plan, for the fullest GPU and for each call."""
    sized = _sized(settings, plan)
    placed = call_costs.placed_models(settings)
    calls = _calls(_on_ranks(settings, plan), plan, placed)
    lengths = lengths_of(settings.config, settings.algorithm, shape_of(settings.config.actor))
    return {
        "gpus": sum(group.workers * group.gpus_per_worker for group in plan.groups),
        **_hardware(_on_ranks(settings, plan)),
        "memory": _fullest(sized, plan, placed.get(ROLLOUTS)),
        "tokens": None if lengths is None else lengths.sequences * lengths.longest,
        "calls": {
            call["name"]: {name: call[name] for name in ("flops", "seconds")} for call in calls
        },
    }


def predicted_seconds(
    settings: Settings, plan: Plan, tokens: MeanTokens
) -> tuple[dict[str, float], str]:
    """Return a mapping from a step's calls to predicted seconds, and the origin of the numbers.

    Sequences have the mean lengths ``tokens``. Omit generation by rollout tasks, because the step
    only reads their samples. Return an empty mapping and an empty string for unknown hardware.

    Raises UsageError or UnreadableInputError for a wrong hardware profile.
    """
    sized = _on_ranks(settings, plan)
    hardware = hardware_of(sized.config.cluster)
    if hardware is None:
        return {}, ""
    placed = call_costs.placed_models(sized)
    found = {}
    rollout = sized.config.rollout
    reads = bool(rollout.backend) and in_tasks(rollout)
    for call in sized.algorithm.calls(sized.config):
        if reads and call.method is Method.GENERATE:
            continue
        cost = call_costs.cost(sized, call, placed, tokens)
        if cost is not None and cost.seconds is not None:
            found[call.name] = round(cost.seconds, 6)
    return found, f"{hardware.source}; error: {hardware.error}"


def _sized(settings: Settings, plan: Plan) -> Settings:
    """Return the settings with sequences limited to the lengths of the rows in the data.

    For a plan with GPUs, return the settings unchanged, because the memory check also assumes the
    lengths that the configuration allows.
    """
    if _uses_gpus(plan):
        return settings
    return replace(settings, config=as_long_as_rows(settings.config, settings.algorithm))


def _on_ranks(settings: Settings, plan: Plan) -> Settings:
    """Return settings with the number of GPUs that the plan gives to each rank."""
    update = {"gpus_per_worker": plan.trainers.gpus_per_worker}
    cluster = settings.config.cluster.model_copy(update=update)
    return replace(settings, config=settings.config.model_copy(update={"cluster": cluster}))


def _longest(settings: Settings) -> int | None:
    """Return the maximum length of a sequence in tokens; None if unknown."""
    lengths = lengths_of(settings.config, settings.algorithm, shape_of(settings.config.actor))
    return None if lengths is None else lengths.longest


def _group(plan: Plan, group: GroupPlan) -> dict[str, Any]:
    """Return the values of a group of workers.

    A fixed group is one job on all hosts, and the elements of its array are successive links. The
    elements of an elastic group are tasks on one host each; ``hosts`` tasks run at once. Tasks in
    the trainers' job have no array, and the job includes their requests.
    """
    memory, slots = group.memory_bytes, group.slots_per_host
    array = f"0-{group.links - 1}%{group.hosts if group.elastic else 1}"
    return {
        "name": group.name,
        "elastic": group.elastic,
        "hosts": group.hosts,
        "spares": group.spares,
        "workers_per_host": group.workers_per_host,
        "gpus_per_worker": group.gpus_per_worker,
        "gpus_per_host": group.gpus_per_worker * slots,
        "cpus_per_host": group.cpus_per_worker * slots,
        "mem_per_host_bytes": None if memory is None else memory * slots,
        "array": array if group in plan.jobs else None,
    }


def _model(
    settings: Settings, plan: Plan, model: ModelPlan, memory: Memory | None
) -> dict[str, Any]:
    section = model_of(settings.config, model.role)
    shape = shape_of(section)
    own = section if model.role != ROLLOUTS else section.model_copy(update={"model": None})
    allocation = parse(model.backend)
    dtype, dtype_from = _precision(settings, model.role, plan)
    return {
        **model.model_dump(mode="json", exclude={"ranks"}),
        "world_size": len(model.ranks),
        "dtype": dtype,
        "dtype_from": dtype_from,
        "padded_vocabulary": padded_vocabulary(Fit(own, allocation, shape, None)),
        "lora": _lora(section, shape, model),
        "memory": None if memory is None else memory.explain(),
        "ranks": [
            {
                "rank": row.rank,
                "place": row.place,
                "host": row.host,
                "gpu": row.gpu,
                **row.coordinates,
                **{f"expert_{axis}": at for axis, at in row.expert_coordinates.items()},
            }
            for row in rows(plan, model)
        ],
    }


def _lora(section: Model, shape: ModelShape | None, model: ModelPlan) -> dict[str, Any] | None:
    """Return rank and parameters of a trained model's adapters; None without adapters."""
    if section.lora is None or not model.trained:
        return None
    one = parse(f"{model.engine}:d1")
    counts = shape and (
        round(trained_shard(section, shape, one, model.head)),
        round(parameters(shape, one, model.head).total),
    )
    trained, every = counts or (None, None)
    return {"rank": section.lora.rank, "trained_parameters": trained, "parameters": every}


def _precision(settings: Settings, role: str, plan: Plan) -> tuple[str, str]:
    """Return the precision of a model, and the setting or default that chooses it."""
    if role == ROLLOUTS and (found := generating(settings.config)).source is not None:
        return found.title, found.source
    return model_of(settings.config, role).dtype, _dtype_from(settings, role, plan)


def _dtype_from(settings: Settings, role: str, plan: Plan) -> str:
    """Return the configuration key that sets a role's precision, or the default's description."""
    for name in (role, "actor"):
        key = (*role_key(name), "dtype")
        if settings.source.writes(*key):
            return dotted(key)
    return f"default on {'GPUs' if _uses_gpus(plan) else 'CPUs'}"


def _uses_gpus(plan: Plan) -> bool:
    return any(group.gpus_per_worker for group in plan.groups)


def _calls(settings: Settings, plan: Plan, placed: dict[str, Placement]) -> list[dict[str, Any]]:
    """Return the calls of a step, with FLOPs of all ranks, and seconds for known hardware."""
    config = settings.config
    by_name: dict[str, Call] = {call.name: call for call in settings.algorithm.calls(config)}
    calls = []
    for call in plan.calls:
        cost = call_costs.cost(settings, by_name[call.name], placed)
        calls.append(
            {
                "name": call.name,
                "model": call.layout or call.role,
                "base": call.base,
                "method": call.method.value,
                "inputs": list(call.inputs),
                "outputs": list(call.outputs),
                "pre_hooks": list(map(str, call.pre_hooks)),
                "post_hooks": list(map(str, call.post_hooks)),
                "ranks": len(call.ranks),
                "flops": cost.flops if cost else None,
                "seconds": round(cost.seconds, 4) if cost and cost.seconds is not None else None,
            }
        )
    return calls


def _hardware(settings: Settings) -> dict[str, Any]:
    """Return the hardware of the predictions with its error; empty for unknown hardware."""
    found = hardware_of(settings.config.cluster)
    names = ("name", "source", "error")
    return {"hardware": {name: getattr(found, name) for name in names}} if found else {}


def _episode(settings: Settings) -> dict[str, Any] | None:
    """Return the settings of episodes; None if completions have one turn."""
    rollout = settings.config.rollout
    if not rollout.episode.has_turns:
        return None
    return {
        **rollout.episode.model_dump(mode="json", exclude={"options"}),
        "environment": rollout.episode.environment and rollout.episode.environment.name,
        "tools": {key: tool.name or key for key, tool in rollout.episode.tools.items()},
        "max_tokens": rollout.most_tokens,
        "max_new_tokens": rollout.max_new_tokens,
    }


def _fullest(settings: Settings, plan: Plan, rollout: Placement | None) -> dict[str, Any]:
    gpus = trainers_gpus(settings)
    server = gpus.server_bytes() if gpus.has_servers else _server_in_task(settings, rollout)
    fullest = gpus.fullest()
    full = _without_adapters(settings)
    process = 0 if _uses_gpus(plan) else call_costs.PROCESS
    return {
        "fullest_gpu": fullest.rank,
        "models": list(fullest.models),
        "bytes": fullest.size + process if fullest.models else None,
        "process_bytes": process,
        "without_adapters_bytes": fullest_gpu(full).size + process if full else None,
        "margin_bytes": fullest.margin if fullest.models else None,
        "gpu_bytes": call_costs.memory_bytes(settings.config.cluster),
        "server_bytes": server,
        "server_sleeps": gpus.has_servers and gpus.server_sleeps,
    }


def _server_in_task(settings: Settings, rollout: Placement | None) -> int | None:
    """Return the bytes per GPU for a rollout task's server; None without a server or if unknown."""
    limit = call_costs.memory_bytes(settings.config.cluster)
    if rollout is None or rollout.group == TRAINERS or limit is None:
        return None
    if not BACKENDS[rollout.allocation.backend].serves:
        return None
    return share_in_task(settings.config.rollout.server_args, limit)


def _without_adapters(settings: Settings) -> Settings | None:
    """Return the settings without adapters; None if no model has adapters."""
    roles = {use.role: settings.config.model(use.role) for use in settings.algorithm.roles()}
    update = {
        role: model.model_copy(update={"lora": None})
        for role, model in roles.items()
        if model.lora is not None
    }
    config = settings.config.with_models(update)
    return replace(settings, config=config) if update else None


def _warnings(plan: Plan) -> list[str]:
    return [
        f"{name}: a tensor-parallel group of {plan.models[name].sizes['tp']} is split over hosts; "
        "change cluster.workers_per_host or the role's gpus to keep the group on one host"
        for name in split_over_hosts(plan)
    ]


Wanted: TypeAlias = tuple[str, tuple[int, ...]]
"""A use of a process group, and the group's ranks."""


@dataclass(frozen=True)
class Row:
    """One rank of a model. ``gpu`` is the number of its GPU on the host of its job or task."""

    rank: int
    place: int
    host: int
    gpu: int
    coordinates: dict[str, int]
    expert_coordinates: dict[str, int]


@dataclass(frozen=True)
class ProcessGroup:
    """A process group of torch.distributed, with its uses.

    A use is ``global``, ``model NAME``, ``NAME AXIS``, or ``NAME expert AXIS`` in the experts'
    layout. Uses of the same ranks share one group.
    """

    uses: tuple[str, ...]
    ranks: tuple[int, ...]


def topology(model: ModelPlan) -> ProcessTopology:
    return ProcessTopology(tuple(model.sizes), tuple(model.sizes.values()))


def expert_topology(model: ModelPlan) -> ProcessTopology | None:
    """Return the experts' layout over the model's ranks; None without experts."""
    if not model.expert_sizes:
        return None
    return ProcessTopology(tuple(model.expert_sizes), tuple(model.expert_sizes.values()))


def rows(plan: Plan, model: ModelPlan) -> list[Row]:
    """Return a row for each rank of a model, in the order of the ranks."""
    group, grid, experts = plan.group(model.group), topology(model), expert_topology(model)
    table = []
    held = len(model.ranks) // len(set(model.ranks))  # A worker with a server holds several ranks.
    for rank, place in enumerate(model.ranks):
        host, worker = divmod(place, group.workers_per_host)
        gpu = worker * held + rank % held
        coordinates = grid.coordinates(rank)
        own = experts.coordinates(rank) if experts else {}
        table.append(Row(rank, place, host, gpu, coordinates, own))
    return table


def process_groups(plan: Plan) -> list[ProcessGroup]:
    """Return the groups of torch.distributed, except groups of one rank.

    The groups are in the order in which every rank of the trainers' job creates them.
    """
    uses: dict[tuple[int, ...], list[str]] = {}
    for use, ranks in _wanted(plan):
        if len(ranks) > 1:
            uses.setdefault(ranks, []).append(use)
    return [ProcessGroup(tuple(named), ranks) for ranks, named in uses.items()]


def _wanted(plan: Plan) -> Iterator[Wanted]:
    yield "global", tuple(range(plan.trainers.world_size))
    for name, model in plan.models_of(TRAINERS).items():
        yield f"model {name}", model.ranks
        yield from _of_axes(model, topology(model), name)
        experts = expert_topology(model)
        if experts is not None:
            yield from _of_axes(model, experts, f"{name} expert")


def _of_axes(model: ModelPlan, grid: ProcessTopology, name: str) -> Iterator[Wanted]:
    for axis, size in zip(grid.axes, grid.sizes, strict=True):
        if size == 1:
            continue
        for members in grid.blocks((axis,)):
            yield f"{name} {axis}", tuple(model.ranks[index] for index in members)


def split_over_hosts(plan: Plan) -> list[str]:
    """Return models whose tensor-parallel groups would fit on a host but are on several hosts."""
    split = []
    for name, model in plan.models.items():
        per_host, size = plan.group(model.group).workers_per_host, model.sizes["tp"]
        if size == 1 or size > per_host:
            continue
        groups = topology(model).blocks(("tp",))
        if any(len({model.ranks[i] // per_host for i in members}) > 1 for members in groups):
            split.append(name)
    return split


FILE, PRESET, DEFAULT = "configuration", "preset", "default"
WIDTH: Final = 100
MOST_DEFAULTS: Final = 6
"""Maximum number of defaults to list. For more defaults, the report shows only their number."""


def in_force(settings: Settings) -> dict[str, Any]:
    """Return the algorithm's ``name``, and its settings by source and dotted key.

    Sources are the configuration, the algorithm's preset, and other defaults. The settings include
    ``rollout.n`` if the algorithm has a default for it.
    """
    algorithm, values = settings.algorithm, settings.source.values
    written = set(flat(values.get("algorithm") or {}))
    preset = set(flat(algorithm.preset))
    by_source: dict[str, dict[str, Any]] = {FILE: {}, PRESET: {}, DEFAULT: {}}
    for key, value in flat(cast(BaseModel, algorithm).model_dump(mode="json")).items():
        source = FILE if key in written else PRESET if key in preset else DEFAULT
        by_source[source][key] = value
    if algorithm.completions > 1:
        chosen = "n" in (values.get("rollout") or {})
        by_source[FILE if chosen else PRESET]["rollout.n"] = settings.config.rollout.n
    name = by_source[FILE].pop("name", algorithm.name)
    by_source[DEFAULT].pop("name", None)
    return {"name": name, **by_source}


def lines(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a wrapped paragraph for each source of settings."""
    titles = {FILE: "set", PRESET: f"preset {settings['name']}", DEFAULT: "default"}
    for source, title in titles.items():
        count = len(settings[source])
        if source == DEFAULT and count > MOST_DEFAULTS:
            yield f"default: {count} other settings (--json shows them)"
        elif count:
            shown = (f"{key} {json.dumps(value)}" for key, value in settings[source].items())
            yield from textwrap.wrap(
                f"{title}: {', '.join(shown)}",
                WIDTH,
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
