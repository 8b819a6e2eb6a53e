"""Which GPUs of the trial hold which model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from slurmrl.allocation import Allocation, parse
from slurmrl.allocation.backends import BACKENDS
from slurmrl.allocation.gpus import parse_gpus
from slurmrl.config.schema import Config, Model
from slurmrl.errors import AllocationError
from slurmrl.graph.call import Call, Method

TRAINERS: Final = "trainer"
ROLLOUTS: Final = "rollout"
LARGEST_HOST: Final = 8
"""Workers that are put on one host where the user does not say."""


@dataclass(frozen=True)
class Placement:
    """``ranks[i]`` is the place, in its group of workers, of the layout's i-th rank."""

    allocation: Allocation
    ranks: tuple[int, ...]
    group: str = TRAINERS


def place(backend: str, gpus: str) -> Placement:
    """A layout on the GPUs that the list names, or on the first ones. Servers without a list are
    tasks of a group of their own. Raises AllocationError."""
    allocation = parse(backend)
    size, serves = allocation.world_size, BACKENDS[allocation.backend].serves
    order = _by_copies(allocation) if serves else tuple(range(size))
    if not gpus.strip():
        return Placement(allocation, order, ROLLOUTS if serves else TRAINERS)
    numbers = parse_gpus(gpus)
    if len(numbers) != size:
        raise AllocationError(
            f"'{gpus}' is not allowed: it has {len(numbers)} GPUs, '{allocation}' takes {size}"
        )
    return Placement(allocation, tuple(numbers[index] for index in order))


def _by_copies(allocation: Allocation) -> tuple[int, ...]:
    """Places of the ranks (stages outermost, copies, tensor ranks) such that each copy of a served
    model lies on neighbours."""
    copies, stages, tp = (allocation.sizes[axis] for axis in ("dp", "pp", "tp"))
    return tuple(
        copy * stages * tp + stage * tp + rank
        for stage in range(stages)
        for copy in range(copies)
        for rank in range(tp)
    )


def placements(config: Config, roles: Iterable[str]) -> dict[str, Placement]:
    """The models of the roles and, under ``rollout``, the engine that generates if it is another
    one. Those with a wrong string are left out."""
    found = {}
    sections = {role: getattr(config, role) for role in roles}
    if config.rollout.backend:
        sections[ROLLOUTS] = config.rollout
    for role, section in sections.items():
        try:
            found[role] = place(section.backend, section.gpus)
        except AllocationError:
            continue
    return found


def model_of(config: Config, name: str) -> Model:
    """The section behind a model of the plan: generation runs the actor's weights."""
    section: Model = config.actor if name == ROLLOUTS else getattr(config, name)
    return section


def layout_of(call: Call, names: Sequence[str]) -> str | None:
    """The model in the plan that a call runs on; None for a call without a model."""
    if call.method is Method.GENERATE and ROLLOUTS in names:
        return ROLLOUTS
    return call.role


def trainers(placed: Iterable[Placement]) -> int:
    """Workers of the trainers' job."""
    return max((max(one.ranks) + 1 for one in placed if one.group == TRAINERS), default=0)


def workers_per_host(workers: int, tp_sizes: Iterable[int], largest: int = LARGEST_HOST) -> int:
    """Workers on each of equal hosts, at most ``largest``: as many as keep tensor-parallel groups
    within a host, else as many as divide them."""
    choices = [size for size in range(min(workers, largest), 0, -1) if workers % size == 0]
    sizes = list(tp_sizes)
    for size in choices:
        if all(size % tp == 0 or (tp > largest and tp % size == 0) for tp in sizes):
            return size
    return choices[0] if choices else 1
