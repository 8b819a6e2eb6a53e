"""Make the plan of a run from its settings, and compare its requests with the cluster."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

from slurmrl.config.allocation import Allocation
from slurmrl.config.schema import WHOLE, Cluster, Config, Slurm, role_key
from slurmrl.errors import Problem, SchedulerError
from slurmrl.plan import placement
from slurmrl.plan.algorithms import uses_of
from slurmrl.plan.checks.generators import fp8_without_gpus
from slurmrl.plan.dataflow import DATASET_KEYS, Call, Graph, Method, RoleUse
from slurmrl.plan.engine_rules import ENGINES, SERVER_KINDS
from slurmrl.plan.estimates.hardware import GIB
from slurmrl.plan.estimates.server_types import unserved_on_cpus
from slurmrl.plan.estimates.shape import shape_of, uses_sequence_parallel
from slurmrl.plan.estimates.worker_memory import slot_bytes
from slurmrl.plan.inherited_settings import gpus_per_worker
from slurmrl.plan.model import CallPlan, GroupPlan, ModelPlan, Offloading, Plan, Reallocation
from slurmrl.plan.placement import ROLLOUTS, Placement, layout_of, model_of, slurm_of
from slurmrl.plan.settings import Settings
from slurmrl.registry import near
from slurmrl.run.reports import TRAINERS
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.parse import HostRow

ROLLOUT_WORKER: Final = "slurmrl.workers.rollout.task_setup:build_rollout"
"""Function that creates the worker of a rollout task."""
STORED: Final = "slurmrl.algorithms.rollout_calls:StoredInterface"
"""Interface of the call that reads the completions of rollout tasks instead of generating."""
STORED_METRICS: Final = ("response_length", "prompt_length", "finished")
AXIS_ORDER: Final = ("pp", "dp", "cp", "tp")
"""Axes from outermost to innermost, in Megatron's order (Narayanan et al. 2021). Tensor-parallel
ranks communicate most and are adjacent; pipeline stages communicate least."""


def make_plan(settings: Settings, *, scheduler: str, hosts: Hosts | None = None) -> Plan:
    """Return the plan for ``scheduler``, which is ``"local"`` or ``"slurm"``.

    If the cluster's ``hosts`` are known, default requests depend on them.
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
    """Return the call that reads completions of rollout tasks in place of a generating call."""
    if call.method is not Method.GENERATE:
        return call
    return replace(call, role=None, interface=STORED, metrics=STORED_METRICS)


def expert_sizes(allocation: Allocation) -> dict[str, int]:
    """Return the sizes of the experts' layout, in Megatron's order; empty without experts."""
    experts = allocation.experts
    if experts is None:
        return {}
    return {"pp": allocation.sizes["pp"], "dp": experts.dp, "ep": experts.ep, "tp": experts.tp}


def _groups(config: Config, placed: Mapping[str, Placement], scheduler: str) -> Iterable[GroupPlan]:
    """Yield the trainers' group, and the group of rollout tasks if there is one."""
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
    """Return the number of hosts of the trainers' job, and of workers and tasks on each host."""
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
    # Slurm requeues the job of a group without a chain, so the job needs no queued successor.
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
    """Return a group with its default requests for CPUs and memory, if it requests GPUs."""
    if scheduler == "local" or group.gpus_per_worker == 0:
        return group
    cluster, needed = settings.config.cluster, group.hosts_of_job
    gpus = group.gpus_per_worker * group.slots_per_host
    slurm = placement.slurm_of(settings.config, group.name)
    given = slurm.gpu_directive == "none"
    fit = [host for host in hosts if given or host.gpus >= gpus]
    estimate = slot_bytes(settings, group)
    of_gpu = cpus(cluster, gpus, needed, fit)
    own = cluster.cpus_per_worker is None
    memory = requested_memory(cluster, estimate, group.slots_per_host, needed, fit)
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
    """Return the plan of a call. A call without a model runs on the actor's ranks."""
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


Hosts: TypeAlias = Mapping[str, Sequence[HostRow]]
"""Mapping from a group's name to the hosts in its partitions."""
CPUS: Final = 8
"""Default number of cores of a worker with a GPU. The cores also run the reward, tokenization,
checkpoints and NCCL."""
SHARE_OF_MEMORY: Final = 0.9
"""Share of a host's memory that a default request may use. Slurm may reserve memory for itself."""
MEMORY_OPTIONS: Final = ("--mem", "--mem-per-cpu", "--mem-per-gpu")


def cpus(
    cluster: Cluster, workers_per_host: int, needed_hosts: int, hosts: Sequence[HostRow]
) -> int:
    """Return the cores of a worker, at most `CPUS` and a GPU's share of its host's cores."""
    if cluster.cpus_per_worker is not None:
        return cluster.cpus_per_worker
    shares = [_cpu_share(host, workers_per_host) for host in _best(hosts, needed_hosts)]
    return max(min([CPUS, *shares]), cluster.threads_per_worker)


def requested_memory(
    cluster: Cluster,
    estimate: int | None,
    workers_per_host: int,
    needed_hosts: int,
    hosts: Sequence[HostRow],
) -> str | None:
    """Return a worker's memory in Slurm's notation, ``estimate`` bytes or less on small hosts.

    Return None, which requests nothing, if the estimate or the hosts' memory is unknown, or if
    ``extra_lines`` request memory.
    """
    if cluster.mem_per_worker is not None:
        return cluster.mem_per_worker
    chosen = _best(hosts, needed_hosts)
    unknown = any(not host.memory_mib for host in chosen)
    if estimate is None or unknown or _requests_memory(cluster):
        return None
    wanted = -(-estimate // GIB)
    least_mib = min((host.memory_mib for host in chosen), default=None)
    if least_mib is None or wanted * 1024 * workers_per_host <= least_mib * SHARE_OF_MEMORY:
        return f"{wanted}G"
    return f"{int(least_mib * SHARE_OF_MEMORY) // workers_per_host}M"


def _best(hosts: Sequence[HostRow], needed: int) -> list[HostRow]:
    """Return the ``needed`` hosts that have the most cores and memory."""
    return sorted(hosts, key=lambda host: (host.cpus, host.memory_mib), reverse=True)[:needed]


def _cpu_share(host: HostRow, workers_per_host: int) -> int:
    """Return the cores for each GPU of a host, or for each worker if workers outnumber GPUs."""
    return host.cpus // max(host.gpus, workers_per_host) if host.cpus else CPUS


def _requests_memory(cluster: Cluster) -> bool:
    lines = [line.strip().removeprefix("#SBATCH").strip() for line in cluster.slurm.extra_lines]
    return any(line.replace("=", " ").split(" ")[0] in MEMORY_OPTIONS for line in lines)


TIMEOUT_S = 10.0


def ask_hosts(config: Config) -> Hosts | None:
    """Return the hosts in the partitions of each group; None if Slurm does not answer."""
    client = SlurmClient(timeout_s=TIMEOUT_S)
    partitions = {name: slurm_of(config, name).partition for name in (TRAINERS, ROLLOUTS)}
    try:
        found = {name: client.hosts(name) for name in set(partitions.values())}
    except SchedulerError:
        return None
    return {group: found[partition] for group, partition in partitions.items()}


def lacking(plan: Plan, config: Config, hosts: Hosts | None) -> list[str]:
    """Return messages about requests that even an idle cluster could not serve."""
    if hosts is not None and (unknown := list(_unknown_partitions(config, hosts))):
        return unknown
    known = (group for group in plan.jobs if hosts is not None and group.name in hosts)
    return [
        line
        for group in known
        for line in _lacking(group, slurm_of(config, group.name), (hosts or {})[group.name])
    ]


def _unknown_partitions(config: Config, hosts: Hosts) -> Iterator[str]:
    """Yield messages about partitions that do not exist. sinfo prints no error for them."""
    named = {
        (name, slurm_of(config, name).partition or "")
        for name, found in hosts.items()
        if not found or "," in (slurm_of(config, name).partition or "")
    }
    wanted = {part.strip() for _, partition in named for part in partition.split(",")} - {""}
    if not wanted:
        return
    try:
        known = SlurmClient(timeout_s=TIMEOUT_S).partition_names()
    except SchedulerError:
        return
    for partition in sorted(wanted.difference(known) if known else ()):
        yield f"Slurm has no partition '{partition}': {near(partition, known)}"


def _lacking(group: GroupPlan, slurm: Slurm, hosts: Sequence[HostRow]) -> Iterator[str]:
    where = f"partition {slurm.partition}" if slurm.partition else "the cluster"
    needed, workers = group.hosts_of_job, group.slots_per_host
    gpus = group.gpus_per_worker * workers if slurm.gpu_directive != "none" else 0
    fit = [host for host in hosts if host.gpus >= gpus]
    if len(fit) < needed:
        kind = "host" if needed == 1 else "hosts"
        kind += f" with {gpus} GPU{'s' if gpus > 1 else ''}" if gpus else ""
        most = max((host.gpus for host in hosts), default=0)
        remedy = "change the layout or cluster.workers_per_host"
        if gpus and not most:
            remedy = "choose a partition with GPUs, or compute on CPUs: cluster.gpus_per_worker=0"
        yield (
            f"the {group.name} group needs {needed} {kind}, but {where} has {len(fit)} (of "
            f"{len(hosts)} hosts with at most {most} GPUs each): {remedy}"
        )
        return
    cpus, mib = group.cpus_per_worker * workers, (group.memory_bytes or 0) * workers >> 20
    requests = [
        ("cores", cpus, "cpus_per_worker", [host.cpus for host in fit]),
        ("MiB of memory", mib, "mem_per_worker", [host.memory_mib for host in fit]),
    ]
    for what, requested, key, there in requests:
        if sum(not size or size >= requested for size in there) < needed:
            yield (
                f"the {group.name} group requests {requested} {what} on each of {needed} hosts, "
                f"but {where} has hosts with at most {max(there)}: lower cluster.{key} or "
                "cluster.workers_per_host"
            )


def scarce(plan: Plan, settings: Settings, hosts: Hosts | None) -> list[str]:
    """Return messages about default requests that were lowered to the hosts' resources."""
    cluster, found = settings.config.cluster, []
    for group in plan.jobs if hosts else ():
        cores = group.cpus_per_worker // max(group.gpus_per_worker, 1)
        memory = group.memory_bytes
        estimate = slot_bytes(settings, group)
        if group.gpus_per_worker and cores < CPUS and cluster.cpus_per_worker is None:
            found.append(
                f"the {group.name} group requests only {cores} cores for each GPU, because hosts "
                f"have no more cores; {CPUS} are usual, and fewer may slow down rewards and data"
            )
        if memory and estimate and memory < estimate and cluster.mem_per_worker is None:
            found.append(
                f"the {group.name} group requests {memory / GIB:.1f} GiB of host memory for each "
                f"worker, because hosts have no more; the estimate is "
                f"{estimate / GIB:.1f} GiB"
            )
    return found


def lacking_gpus(settings: Settings, plan: Plan) -> list[Problem]:
    """Return a problem for each layout whose engine cannot compute on workers without GPUs."""
    gpus = {group.name: group.gpus_per_worker for group in plan.groups}
    cause = "cluster.gpus_per_worker is 0"
    if settings.config.cluster.gpus_per_worker is None:
        cause = "this machine, where the trial would run, has no GPU"
    found: dict[str, Problem] = {}
    for model in plan.models.values():
        if gpus[model.group] or model.backend in found:
            continue
        reason, remedy = "", "on CPUs use native or sglang"
        if ENGINES[model.engine].needs_gpu:
            reason = f"the {model.engine} engine needs a GPU for each worker, and {cause}"
            remedy = "on CPUs use fsdp"
        elif model.engine in SERVER_KINDS and not settings.config.rollout.servers:
            shape, arguments = shape_of(settings.config.actor), settings.config.rollout.server_args
            if shape and (lack := unserved_on_cpus(model.engine, shape, arguments)):
                reason = f"{lack}, and {cause}"
                remedy = "on CPUs use native" if shape.biased_experts else remedy
        if not reason:
            continue
        message = f"'{model.backend}' is not allowed: {reason}; {remedy}"
        section = (ROLLOUTS,) if model.role == ROLLOUTS else role_key(model.role)
        found[model.backend] = settings.source.problem((*section, "backend"), message)
    rollouts = plan.models.get(ROLLOUTS)
    if rollouts is None or gpus[rollouts.group]:
        return list(found.values())
    return [*found.values(), *fp8_without_gpus(settings.config, settings.source, cause)]
