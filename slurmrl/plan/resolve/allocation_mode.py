"""The deprecated ``allocation_mode``: all roles' layouts in one string, moved to their fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from slurmrl.allocation import Components, parse_components
from slurmrl.allocation.allocation import BACKENDS
from slurmrl.allocation.gpus import format_gpus
from slurmrl.allocation.legacy_spellings import ROLES, HostShape, Placed, parse_legacy, spelled
from slurmrl.config.schema import Config, Model
from slurmrl.config.source import Source
from slurmrl.errors import AllocationError, Problem

FIELD: Final = "allocation_mode"
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
        placed = read(text, shape_of(config))
    except AllocationError as error:
        return without, [source.problem((FIELD,), str(error))], []
    note = f"{FIELD} is deprecated; write instead: {', '.join(spelled(placed))}"
    return _placed(without, placed), [], [note]


def shape_of(config: Config) -> HostShape:
    return HostShape(
        config.cluster.hosts or 1, config.cluster.workers_per_host or USUAL_GPUS_PER_HOST
    )


def read(text: str, shape: HostShape) -> dict[str, Placed]:
    """The roles in a string of either grammar. Raises the AllocationError of the grammar that read
    further."""
    try:
        components = parse_components(text)
    except AllocationError as current:
        try:
            return parse_legacy(text, shape)
        except AllocationError as legacy:
            raise max(legacy, current, key=_position) from None
    return of_components(components)


def explain(text: str) -> dict[str, Any]:
    """The sizes of a layout as plain values. A string of an earlier system is explained in the
    current spelling, with its own under ``legacy``; words such as ``pipe_model`` are for one host
    of `USUAL_GPUS_PER_HOST`. Raises AllocationError as `read` does."""
    try:
        return parse_components(text).explain()
    except AllocationError:
        placed = read(text, HostShape(1, USUAL_GPUS_PER_HOST))
    parts = [replace(place.allocation, name=role).explain() for role, place in placed.items()]
    return {"string": text, "write_instead": list(spelled(placed)), "components": parts}


def of_components(components: Components) -> dict[str, Placed]:
    """Components are named after roles; an unnamed one is the rollout if it cannot train, else the
    actor. Raises AllocationError for two components of one role, and if there is no actor."""
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
    if "actor" not in roles:
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
