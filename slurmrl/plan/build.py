"""From settings to the plan of a run."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from slurmrl.config.allocation import Allocation
from slurmrl.config.schema import WHOLE, Config
from slurmrl.plan import placement, resources
from slurmrl.plan.algorithms import uses_of
from slurmrl.plan.dataflow import DATASET_KEYS, Call, Graph, Method, RoleUse
from slurmrl.plan.estimates.memory import uses_sequence_parallel
from slurmrl.plan.estimates.worker_memory import slot_bytes
from slurmrl.plan.model import CallPlan, GroupPlan, ModelPlan, Offloading, Plan, Reallocation
from slurmrl.plan.placement import ROLLOUTS, Placement, layout_of, model_of
from slurmrl.plan.resolve.inherited_settings import gpus_per_worker
from slurmrl.plan.settings import Settings
from slurmrl.run.reports import TRAINERS
from slurmrl.scheduler.parse import HostRow

ROLLOUT_WORKER: Final = "slurmrl.workers.rollout.task_setup:build_rollout"
"""Function that makes the worker of a rollout task."""
STORED: Final = "slurmrl.algorithms.rollout_calls:StoredInterface"
"""Interface that reads the completions of rollout tasks instead of generating."""
STORED_METRICS: Final = ("response_length", "prompt_length", "finished")
AXIS_ORDER: Final = ("pp", "dp", "cp", "tp")
"""From the outermost to the innermost: tensor-parallel ranks communicate most and are adjacent,
pipeline stages communicate least. The order is Megatron's (Narayanan et al. 2021)."""


def make_plan(settings: Settings, *, scheduler: str, hosts: resources.Hosts | None = None) -> Plan:
    """Return the plan for ``scheduler``, ``"local"`` or ``"slurm"``.

    It is for the cluster's ``hosts`` if they are known.
    """
    config, algorithm = settings.config, settings.algorithm
    uses = {use.role: use for use in uses_of(config, algorithm)}
    placed = placement.placements(config, uses)
    models = {
        name: _model(config, uses.get(name) or RoleUse(name, trained=False), place)
        for name, place in placed.items()
    }
    offloaded = placement.offloaded(config, placed)
    averages = [
        Reallocation(source="actor", target=name, eta=eta)
        for name, model in models.items()
        if model.averaged and (eta := model_of(config, name).ema) is not None
    ]
    of_trainers = {name: model for name, model in models.items() if model.group == TRAINERS}
    planned = partial(_call, models=of_trainers, offloaded=offloaded, averages=averages)
    calls: Sequence[Call] = Graph(algorithm.calls(config), DATASET_KEYS[config.dataset.kind]).order
    if len(of_trainers) < len(models):
        calls = [_stored(call) for call in calls]
    evaluations = {
        suite: Graph(algorithm.evaluation_calls(own), DATASET_KEYS[own.held_out.kind]).order
        for suite, own in config.evaluations.items()
        if config.trainers_evaluate
    }
    return Plan(
        experiment=config.experiment,
        trial=config.trial,
        groups=tuple(
            _with_resources(settings, group, scheduler, (hosts or {}).get(group.name, ()))
            for group in _groups(config, placed, scheduler)
        ),
        models=models,
        calls=tuple(map(planned, calls)),
        evaluation_calls=tuple(map(planned, evaluations.pop(WHOLE, ()))),
        suite_calls={suite: tuple(map(planned, own)) for suite, own in evaluations.items()},
    )


def _model(config: Config, use: RoleUse, placed: Placement) -> ModelPlan:
    allocation = placed.allocation
    section = model_of(config, use.role)
    sizes = section.model if use.role != ROLLOUTS else None
    return ModelPlan(
        role=use.role,
        backend=str(allocation),
        engine=allocation.backend,
        sizes={axis: allocation.sizes[axis] for axis in AXIS_ORDER},
        ranks=placed.ranks,
        trained=use.trained,
        head=use.head,
        group=placed.group,
        expert_sizes=expert_sizes(allocation),
        virtual_pipeline=(sizes.virtual_pipeline_model_parallel_size if sizes else None) or 1,
        averaged=use.role != ROLLOUTS and section.ema is not None,
        sequence_parallel=use.role != ROLLOUTS and uses_sequence_parallel(section, allocation),
    )


def _stored(call: Call) -> Call:
    """The call of completions that rollout tasks have made."""
    if call.method is not Method.GENERATE:
        return call
    return replace(call, role=None, interface=STORED, metrics=STORED_METRICS)


def expert_sizes(allocation: Allocation) -> dict[str, int]:
    """The experts' own grid, in Megatron's order as well; empty without experts."""
    experts = allocation.experts
    if experts is None:
        return {}
    return {"pp": allocation.sizes["pp"], "dp": experts.dp, "ep": experts.ep, "tp": experts.tp}


def _groups(config: Config, placed: Mapping[str, Placement], scheduler: str) -> Iterable[GroupPlan]:
    """The trainers' job, and the rollout tasks, one for each copy of the model."""
    gpus = gpus_per_worker(config.cluster, scheduler)
    hosts, own, inside = _hosts(config, placed, scheduler)
    _, slots = placement.tasks_inside(config, placed)
    trainers = _group(config, gpus, TRAINERS, hosts, own)
    spares = 0 if scheduler == "local" else config.cluster.slurm.spares
    inside_job = {"spares": spares, "tasks_per_host": inside, "slots_per_task": slots}
    yield trainers.model_copy(update=inside_job)
    rollout = placed.get(ROLLOUTS)
    if rollout is not None and rollout.group == ROLLOUTS:
        tasks, size = rollout.allocation.sizes["dp"], rollout.allocation.instance_size
        workers = (max(rollout.ranks) + 1) // tasks
        gpus *= size // workers
        group = _group(config, gpus, ROLLOUTS, tasks, workers, elastic=True)
        yield group.model_copy(update={"worker": ROLLOUT_WORKER})


def _hosts(config: Config, placed: Mapping[str, Placement], scheduler: str) -> tuple[int, int, int]:
    """Hosts of the trainers' job, and the equal numbers of workers and of tasks on each."""
    if scheduler != "local":
        return placement.hosts_of_trainers(config, placed)
    tasks, _ = placement.tasks_inside(config, placed)
    return 1, placement.trainers(placed.values()), tasks


def _group(
    config: Config,
    gpus: int,
    name: str,
    hosts: int,
    workers_per_host: int,
    *,
    elastic: bool = False,
) -> GroupPlan:
    cluster = config.cluster
    slurm = placement.slurm_of(config, name)
    # A job that Slurm requeues needs no successor in the queue.
    links = slurm.links if slurm.continue_ == "chain" else 1
    return GroupPlan(
        name=name,
        hosts=hosts,
        workers_per_host=workers_per_host,
        gpus_per_worker=gpus,
        threads_per_worker=cluster.threads_per_worker,
        cpus_per_worker=cluster.cpus_per_worker or cluster.threads_per_worker,
        mem_per_worker=cluster.mem_per_worker,
        links=slurm.links * hosts if elastic else links,
        elastic=elastic,
    )


def _with_resources(
    settings: Settings, group: GroupPlan, scheduler: str, hosts: Sequence[HostRow]
) -> GroupPlan:
    """Add the default requests of a group with GPUs; the local scheduler requests nothing."""
    if scheduler == "local" or group.gpus_per_worker == 0:
        return group
    cluster, needed = settings.config.cluster, group.hosts_of_job
    gpus = group.gpus_per_worker * group.slots_per_host
    slurm = placement.slurm_of(settings.config, group.name)
    given = slurm.gpu_directive == "none"
    fit = [host for host in hosts if given or host.gpus >= gpus]
    estimate = slot_bytes(settings, group)
    of_gpu = resources.cpus(cluster, gpus, needed, fit)
    own = cluster.cpus_per_worker is None
    memory = resources.memory(cluster, estimate, group.slots_per_host, needed, fit)
    return group.model_copy(
        update={
            "cpus_per_worker": of_gpu * group.gpus_per_worker if own else of_gpu,
            "mem_per_worker": memory,
        }
    )


def _call(
    call: Call,
    models: Mapping[str, ModelPlan],
    offloaded: Container[str],
    averages: Iterable[Reallocation],
) -> CallPlan:
    """A call without a model runs where the actor does."""
    own = layout_of(call, list(models))
    layout = own or "actor"
    before: tuple[Reallocation, ...] = ()
    base = call.role is not None and call.role not in models
    if call.role is not None and layout != call.role and not base:
        before = (Reallocation(source=call.role, target=layout),)
    after: list[Reallocation | Offloading] = []
    if call.role == "actor" and call.method is Method.TRAIN_STEP:
        after += averages
    if own is not None and own in offloaded:
        after.append(Offloading(model=own))
    return CallPlan(
        name=call.name,
        role=call.role,
        method=call.method,
        interface=call.interface,
        inputs=call.inputs,
        outputs=call.outputs,
        ranks=models[layout].ranks,
        layout=layout if before or base else None,
        base=base,
        pre_hooks=before,
        post_hooks=tuple(after),
    )
