"""The deprecated ``allocation_mode``: all roles' layouts in one string, moved to their fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from slurmrl.config.allocation import Components, parse, parse_components
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.allocation.legacy_spellings import (
    ROLES,
    HostShape,
    Placed,
    parse_legacy,
    spelled,
)
from slurmrl.config.allocation.parser import format_gpus, parse_gpus
from slurmrl.config.schema import Config, Model
from slurmrl.config.source import Source
from slurmrl.errors import AllocationError, Problem

FIELD: Final = "allocation_mode"
ROLLOUT: Final = "rollout"
UNTRAINED: Final = ("evaluate", "generate")
"""Algorithms whose strings may have servers alone."""
USUAL_GPUS_PER_HOST: Final = 8


def apply(config: Config, source: Source) -> tuple[Config, list[Problem], list[str]]:
    """Replace ``allocation_mode`` by the roles' own fields. Returns the configuration, the problems
    found, and a note with the current spelling."""
    text = config.allocation_mode
    if not text.strip():
        return config, [], []
    without = config.model_copy(update={FIELD: ""})
    twice = list(_written_twice(config))
    if twice:
        message = f"'{text}' is not allowed beside {', '.join(twice)}: leave out {FIELD}"
        return without, [source.problem((FIELD,), message)], []
    try:
        trains = config.algorithm.get("name") not in UNTRAINED
        placed = read(text, shape_of(config), trains=trains)
    except AllocationError as error:
        return without, [source.problem((FIELD,), str(error))], []
    if config.rollout.tasks is None and not config.rollout.servers:
        placed = in_one_job(placed)
    lines = [*spelled(placed)]
    if _serves(placed) and config.rollout.python is None and not config.rollout.servers:
        lines.append(f"rollout.python: a Python with {placed[ROLLOUT].allocation.backend}")
    note = f"{FIELD} is deprecated; write instead: {', '.join(lines)}"
    return _placed(without, placed), [], [note]


def shape_of(config: Config) -> HostShape:
    return HostShape(
        config.cluster.hosts or 1, config.cluster.workers_per_host or USUAL_GPUS_PER_HOST
    )


def read(text: str, shape: HostShape, *, trains: bool = True) -> dict[str, Placed]:
    """The roles in a string of either grammar. Without training, the actor of servers alone has
    their GPUs. Raises the AllocationError of the grammar that read further."""
    try:
        components = parse_components(text)
    except AllocationError as current:
        try:
            placed = parse_legacy(text, shape, trains=trains)
        except AllocationError as legacy:
            raise max(legacy, current, key=_position) from None
    else:
        placed = of_components(components, trains=trains)
    if "actor" in placed or not _serves(placed):
        return placed
    size = placed[ROLLOUT].allocation.world_size
    actor = Placed(parse(f"fsdp:d{size}"))
    return {"actor": actor, ROLLOUT: replace(placed[ROLLOUT], gpus=format_gpus(range(size)))}


def in_one_job(placed: Mapping[str, Placed]) -> dict[str, Placed]:
    """Give servers that the trainers' job starts the GPUs behind the trainers'."""
    if not _serves(placed) or placed[ROLLOUT].gpus:
        return dict(placed)
    trainers = [place for role, place in placed.items() if role != ROLLOUT]
    first = max(max(_gpus_of(place), default=-1) for place in trainers) + 1
    size = placed[ROLLOUT].allocation.world_size
    beside = replace(placed[ROLLOUT], gpus=format_gpus(range(first, first + size)))
    return {**placed, ROLLOUT: beside}


def _gpus_of(place: Placed) -> Sequence[int]:
    return parse_gpus(place.gpus) if place.gpus else range(place.allocation.world_size)


def _serves(placed: Mapping[str, Placed]) -> bool:
    return ROLLOUT in placed and BACKENDS[placed[ROLLOUT].allocation.backend].serves


def explain(text: str) -> dict[str, Any]:
    """The sizes of a layout as plain values. A string of an earlier system is explained in the
    current spelling, with its own under ``legacy``; words such as ``pipe_model`` are for one host
    of `USUAL_GPUS_PER_HOST`. Raises AllocationError as `read` does."""
    try:
        return parse_components(text).explain()
    except AllocationError:
        placed = in_one_job(read(text, HostShape(1, USUAL_GPUS_PER_HOST), trains=False))
    parts = [replace(place.allocation, name=role).explain() for role, place in placed.items()]
    return {"string": text, "write_instead": list(spelled(placed)), "components": parts}


def of_components(components: Components, *, trains: bool = True) -> dict[str, Placed]:
    """Components are named after roles; an unnamed one is the rollout if it cannot train, else the
    actor. Raises AllocationError for two components of one role, and if a trial that ``trains`` has
    no actor."""
    roles: dict[str, Placed] = {}
    start = 0
    for place in components.places:
        apart = all(BACKENDS[allocation.backend].serves for allocation in place)
        for allocation in place:
            backend = BACKENDS[allocation.backend]
            role = allocation.name or ("actor" if backend.trains else "rollout")
            if role not in ROLES:
                known = ", ".join(ROLES)
                raise AllocationError(f"'{allocation}': '{role}' is not a role; allowed: {known}")
            if role in roles:
                raise AllocationError(f"'{components}' has two layouts for the {role}")
            pinned = not apart and (start > 0 or backend.serves)
            gpus = format_gpus(range(start, start + allocation.world_size)) if pinned else ""
            roles[role] = Placed(allocation, gpus)
        start += 0 if apart else place[0].world_size
    if "actor" not in roles and (trains or not _serves(roles)):
        raise AllocationError(f"'{components}': no component trains the actor")
    return roles


def _position(error: AllocationError) -> int:
    return -1 if error.position is None else error.position


def _written_twice(config: Config) -> Iterator[str]:
    for role in ROLES:
        section = getattr(config, role)
        if section is None:
            continue
        for field in ("backend", "gpus"):
            if getattr(section, field, None):
                yield f"{role}.{field}"


def _placed(config: Config, placed: Mapping[str, Placed]) -> Config:
    update = {}
    for role, layout in placed.items():
        section = getattr(config, role) or Model()
        update[role] = section.model_copy(update={"backend": layout.backend, "gpus": layout.gpus})
    return config.model_copy(update=update)
