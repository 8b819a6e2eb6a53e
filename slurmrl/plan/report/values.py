"""The report of ``slurmrl plan`` as plain values: a plan with its rank tables, process groups and
estimates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from slurmrl.config.allocation import parse
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.schema import Model, role_key
from slurmrl.config.source import dotted
from slurmrl.plan.algorithms import uses_of
from slurmrl.plan.checks.fit import Fit, padded_vocabulary
from slurmrl.plan.estimates import costs, hardware, servers
from slurmrl.plan.estimates.gpus import fullest_gpu, trainers_gpus
from slurmrl.plan.estimates.host import server_experts_bytes, worker_bytes
from slurmrl.plan.estimates.lengths import as_long_as_rows, lengths_of
from slurmrl.plan.estimates.memory import Memory
from slurmrl.plan.estimates.parameters import parameters, trained_shard
from slurmrl.plan.estimates.shape import ModelShape, shape_of
from slurmrl.plan.graph.call import Call
from slurmrl.plan.model import GroupPlan, ModelPlan, Plan
from slurmrl.plan.placement import ROLLOUTS, Placement, model_of, placements
from slurmrl.plan.precision import generating
from slurmrl.plan.report import tables
from slurmrl.plan.report.algorithm import in_force
from slurmrl.plan.settings import Settings
from slurmrl.run.worlds import TRAINERS


def report(settings: Settings, plan: Plan, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """The report of a plan; ``warnings`` are added to its own."""
    sized = _sized(settings, plan)
    memories = costs.memories(sized)
    placed = placements(
        settings.config, [use.role for use in uses_of(settings.config, settings.algorithm)]
    )
    groups = tables.process_groups(plan)
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
        "calls": _calls(settings, plan, placed),
        "episode": _episode(settings),
        "process_groups": [asdict(group) for group in groups],
        "process_group_counts": dict(Counter(use for group in groups for use in group.uses)),
        "memory": {
            **_fullest(sized, placed.get(ROLLOUTS)),
            "longest_row": None if sized.config is settings.config else _longest(sized),
        },
        "warnings": [*_warnings(plan), *warnings],
        "notes": list(settings.notes),
        "missing": [str(problem) for problem in settings.missing],
    }


def figures(settings: Settings, plan: Plan) -> dict[str, Any]:
    """The estimates of a plan alone: of the fullest GPU, and of the calls by name."""
    sized = _sized(settings, plan)
    placed = placements(
        settings.config, [use.role for use in uses_of(settings.config, settings.algorithm)]
    )
    calls = _calls(settings, plan, placed)
    lengths = lengths_of(settings.config, settings.algorithm, shape_of(settings.config.actor))
    return {
        "gpus": sum(group.workers * group.gpus_per_worker for group in plan.groups),
        "memory": _fullest(sized, placed.get(ROLLOUTS)),
        "tokens": None if lengths is None else lengths.sequences * lengths.longest,
        "calls": {
            call["name"]: {name: call[name] for name in ("flops", "seconds")} for call in calls
        },
    }


def _sized(settings: Settings, plan: Plan) -> Settings:
    """The same with sequences no longer than the rows of the data make them. A plan with GPUs
    counts what the configuration allows, as the check that refuses what does not fit."""
    if _uses_gpus(plan):
        return settings
    return replace(settings, config=as_long_as_rows(settings.config, settings.algorithm))


def _longest(settings: Settings) -> int | None:
    """Tokens of the longest sequence."""
    lengths = lengths_of(settings.config, settings.algorithm, shape_of(settings.config.actor))
    return None if lengths is None else lengths.longest


def _group(plan: Plan, group: GroupPlan) -> dict[str, Any]:
    """A fixed group is one job on all its hosts; its array's elements are successive links. In an
    elastic group they are tasks of one host each, of which ``hosts`` run at a time; tasks in the
    trainers' job have no array, and the job requests what they need."""
    memory, slots = group.memory_bytes, group.slots_per_host
    array = f"0-{group.links - 1}%{group.hosts if group.elastic else 1}"
    return {
        "name": group.name,
        "elastic": group.elastic,
        "hosts": group.hosts,
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
            for row in tables.rows(plan, model)
        ],
    }


def _lora(section: Model, shape: ModelShape | None, model: ModelPlan) -> dict[str, Any] | None:
    """A trained model's adapters, and their share of its parameters."""
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
    """Where the precision of a role comes from: a key of the configuration, or a default."""
    for name in (role, "actor"):
        key = (*role_key(name), "dtype")
        if settings.source.writes(*key):
            return dotted(key)
    return f"default on {'GPUs' if _uses_gpus(plan) else 'CPUs'}"


def _uses_gpus(plan: Plan) -> bool:
    return any(group.gpus_per_worker for group in plan.groups)


def _calls(settings: Settings, plan: Plan, placed: dict[str, Placement]) -> list[dict[str, Any]]:
    """The calls of a step, with FLOPs of all ranks together and seconds where the GPU is known."""
    config = settings.config
    by_name: dict[str, Call] = {call.name: call for call in settings.algorithm.calls(config)}
    calls = []
    for call in plan.calls:
        cost = costs.cost(settings, by_name[call.name], placed)
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


def _episode(settings: Settings) -> dict[str, Any] | None:
    """How completions come about, where they may have several turns."""
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


def _fullest(settings: Settings, rollout: Placement | None) -> dict[str, Any]:
    gpus = trainers_gpus(settings)
    server = gpus.server_bytes() if gpus.has_servers else _server_in_task(settings, rollout)
    fullest = gpus.fullest()
    full = _without_adapters(settings)
    return {
        "fullest_gpu": fullest.rank,
        "models": list(fullest.models),
        "bytes": fullest.size if fullest.models else None,
        "without_adapters_bytes": fullest_gpu(full).size if full else None,
        "margin_bytes": fullest.margin if fullest.models else None,
        "gpu_bytes": hardware.memory_bytes(settings.config.cluster),
        "server_bytes": server,
        "server_sleeps": gpus.has_servers and gpus.server_sleeps,
    }


def _server_in_task(settings: Settings, rollout: Placement | None) -> int | None:
    """Bytes of each GPU for the server of a rollout task; None without one, or on unknown GPUs."""
    limit = hardware.memory_bytes(settings.config.cluster)
    if rollout is None or rollout.group == TRAINERS or limit is None:
        return None
    if not BACKENDS[rollout.allocation.backend].serves:
        return None
    return servers.share_in_task(settings.config.rollout.server_args, limit)


def _without_adapters(settings: Settings) -> Settings | None:
    """The same with all weights trained; None if no model has adapters."""
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
        "change cluster.workers_per_host or the role's gpus to keep it on one"
        for name in tables.split_over_hosts(plan)
    ]
