"""The placement of models on the trial's GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from slurmrl.config.allocation import Allocation, parse
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.allocation.parser import parse_gpus
from slurmrl.config.schema import Config, Model, Rollout, Slurm
from slurmrl.errors import AllocationError
from slurmrl.plan.dataflow import Call, Method
from slurmrl.run.reports import TRAINERS

ROLLOUTS: Final = "rollout"
REFERENCE: Final = "ref"
OWN: Final = (
    "path",
    "architecture",
    "implementation",
    "dtype",
    "backend",
    "gpus",
    "model",
    "max_tokens_per_microbatch",
)
"""Settings that a reference must share with the actor to use the actor's frozen weights."""
LARGEST_HOST: Final = 8
"""Maximum number of workers on one host, unless the user sets the number."""


@dataclass(frozen=True)
class Placement:
    """The workers that hold the ranks of a layout.

    ``ranks[i]`` is the worker of its group that holds the layout's i-th rank. One worker has all
    ranks of a server in a rollout task.
    """

    allocation: Allocation
    ranks: tuple[int, ...]
    group: str = TRAINERS


def place(backend: str, gpus: str, *, group: str = TRAINERS) -> Placement:
    """Return the placement of a layout on the listed GPUs of a group, by default its first GPUs.

    Raises AllocationError.
    """
    allocation = parse(backend)
    size, serves = allocation.world_size, BACKENDS[allocation.backend].serves
    order = _by_copies(allocation) if serves else tuple(range(size))
    if serves and group == ROLLOUTS:
        servers = (place // allocation.instance_size for place in order)
        return Placement(allocation, tuple(servers), group)
    if not gpus.strip():
        return Placement(allocation, order, group)
    numbers = parse_gpus(gpus)
    if len(numbers) != size:
        raise AllocationError(
            f"'{gpus}' is not allowed: it has {len(numbers)} GPUs, but '{allocation}' needs {size}"
        )
    return Placement(allocation, tuple(numbers[index] for index in order))


def _by_copies(allocation: Allocation) -> tuple[int, ...]:
    """Return the GPU of each rank, so that each copy of a served model has adjacent GPUs.

    Ranks are numbered with stages outermost, then copies, then tensor ranks.
    """
    copies, stages, tp = (allocation.sizes[axis] for axis in ("dp", "pp", "tp"))
    return tuple(
        copy * stages * tp + stage * tp + rank
        for stage in range(stages)
        for copy in range(copies)
        for rank in range(tp)
    )


def placements(config: Config, roles: Iterable[str]) -> dict[str, Placement]:
    """Return the placements of the roles' models, and of generation under the name ``rollout``.

    Omit invalid placements, and roles without a separate model (`uses_base`).
    """
    placed = {}
    sections: dict[str, Model | Rollout] = {
        role: config.model(role) for role in roles if not uses_base(config, role)
    }
    if config.rollout.backend:
        sections[ROLLOUTS] = config.rollout
    for role, section in sections.items():
        try:
            if role == ROLLOUTS and in_tasks(config.rollout):
                placed[role] = place(section.backend, "", group=ROLLOUTS)
            else:
                placed[role] = place(section.backend, section.gpus)
        except AllocationError:
            continue
    return placed


def in_tasks(rollout: Rollout) -> bool:
    """Return whether rollout tasks generate, with or without servers' GPUs.

    Raises AllocationError.
    """
    if rollout.tasks is not None:
        return True
    apart = not rollout.gpus.strip() and not rollout.servers
    return apart and BACKENDS[parse(rollout.backend).backend].serves


def uses_base(config: Config, role: str) -> bool:
    """Return whether a role is the actor without its adapters.

    This holds for a reference with the same weights, layout and precision.
    """
    model = config.find_model(role)
    if role != REFERENCE or model is None or config.actor.lora is None or model.ema is not None:
        return False
    return all(getattr(model, name) == getattr(config.actor, name) for name in OWN)


def model_of(config: Config, name: str) -> Model:
    """Return the section of a model of the plan; generation has the actor's section."""
    return config.actor if name == ROLLOUTS else config.model(name)


def slurm_of(config: Config, group: str) -> Slurm:
    """Return the Slurm options of a group's jobs. Raises ValueError, which a check reports."""
    slurm = config.cluster.slurm
    return config.rollout.slurm.over(slurm) if group == ROLLOUTS else slurm


def layout_of(call: Call, names: Sequence[str]) -> str | None:
    """Return the model in ``names`` that a call uses; None for a call without a model."""
    if call.method is Method.GENERATE and ROLLOUTS in names:
        return ROLLOUTS
    return "actor" if call.role == REFERENCE and REFERENCE not in names else call.role


def offloaded(config: Config, placed: Mapping[str, Placement]) -> frozenset[str]:
    """Return the names of the models that leave device memory between calls."""
    found = {name for name in placed if name != ROLLOUTS and model_of(config, name).offload}
    rollout, wanted = placed.get(ROLLOUTS), config.rollout.offload
    if rollout is None or rollout.group != TRAINERS or config.rollout.servers:
        return frozenset(found)
    if wanted is None:
        others = {rank for name in placed if name != ROLLOUTS for rank in placed[name].ranks}
        wanted = not others.isdisjoint(rollout.ranks)
    return frozenset(found | {ROLLOUTS} if wanted else found)


def trainers(placed: Iterable[Placement]) -> int:
    """Return the number of workers in the trainers' job."""
    return max((max(place.ranks) + 1 for place in placed if place.group == TRAINERS), default=0)


def tensor_sizes(placed: Mapping[str, Placement]) -> list[int]:
    """Return the tensor-parallel sizes of the models in the trainers' job."""
    return [place.allocation.sizes["tp"] for place in placed.values() if place.group == TRAINERS]


def tasks_inside(config: Config, placed: Mapping[str, Placement]) -> tuple[int, int]:
    """Return the number of rollout tasks in the trainers' job, and the GPUs of each task."""
    rollout = config.rollout
    if rollout.tasks is None or not rollout.gpus.strip() or ROLLOUTS not in placed:
        return 0, 1
    allocation = placed[ROLLOUTS].allocation
    return allocation.sizes["dp"], allocation.instance_size


def hosts_of_trainers(config: Config, placed: Mapping[str, Placement]) -> tuple[int, int, int]:
    """Return the hosts of the trainers' job, and the workers and rollout tasks on each host.

    Raises AllocationError if the hosts cannot have equally many workers.
    """
    workers, (tasks, size) = trainers(placed.values()), tasks_inside(config, placed)
    given, total = config.cluster.workers_per_host, workers + tasks * size
    if given is None:
        per_host = workers_per_host(workers, tensor_sizes(placed), tasks, size)
        hosts, rest = divmod(workers, per_host)
    else:
        hosts, rest = divmod(total, min(given, total))  # A single host may have unused GPUs.
    if not rest and hosts and workers % hosts == 0 and tasks % hosts == 0:
        return hosts, workers // hosts, tasks // hosts
    of_actor = f"workers of actor.backend '{placed['actor'].allocation}'"
    if not tasks:
        raise AllocationError(f"{given} is not allowed: must divide {workers} ({of_actor})")
    value = f"'{config.rollout.gpus}'" if given is None else given
    raise AllocationError(
        f"{value} is not allowed: hosts with {given or LARGEST_HOST} GPUs cannot share equally "
        f"the {workers} {of_actor} and the {tasks} rollout tasks (GPUs of each task: {size})"
    )


def workers_per_host(
    workers: int, tp_sizes: Iterable[int], tasks: int = 0, gpus_per_task: int = 1
) -> int:
    """Return the workers on each of equally filled hosts with at most `LARGEST_HOST` GPUs.

    The result is the maximum that keeps each tensor-parallel group within a host, or else the
    maximum that divides the groups. Each host also has its share of ``tasks``. Return 1 if no
    number fits.
    """

    def fits(size: int) -> bool:
        beside, rest = divmod(tasks, workers // size)
        return not rest and size + beside * gpus_per_task <= LARGEST_HOST

    largest = min(workers, LARGEST_HOST)
    choices = [size for size in range(largest, 0, -1) if workers % size == 0 and fits(size)]
    sizes = list(tp_sizes)
    for size in choices:
        if all(size % tp == 0 or (tp > LARGEST_HOST and tp % size == 0) for tp in sizes):
            return size
    return choices[0] if choices else 1
