"""The deprecated ``allocation_mode``: all roles' layouts in one string, put into their fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from slurmrl.allocation import Components, parse_components
from slurmrl.allocation.backends import BACKENDS
from slurmrl.allocation.gpus import format_gpus
from slurmrl.allocation.legacy_spellings import ROLES, HostShape, Placed, parse_legacy, spelled
from slurmrl.config.schema import Config, Model
from slurmrl.config.source import Source
from slurmrl.errors import AllocationError, Problem

FIELD: Final = "allocation_mode"
USUAL_GPUS_PER_HOST: Final = 8


def apply(config: Config, source: Source) -> tuple[Config, list[Problem], list[str]]:
    """The configuration with the roles' own fields in place of ``allocation_mode``, what is wrong
    with it, and a note that says how to write it now."""
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
    """The roles in a string of either kind. Raises the AllocationError of the kind that made sense
    of more of it."""
    try:
        components = parse_components(text)
    except AllocationError as current:
        try:
            return parse_legacy(text, shape)
        except AllocationError as older:
            raise max(older, current, key=_position) from None
    return of_components(components)


def of_components(components: Components) -> dict[str, Placed]:
    """Components are named after roles; one without a name is the rollout if it cannot train, else
    the actor. Raises AllocationError for two of a role and for no actor."""
    found: dict[str, Placed] = {}
    start = 0
    for place in components.places:
        apart = all(BACKENDS[one.backend].serves for one in place)
        for one in place:
            role = one.name or ("actor" if BACKENDS[one.backend].trains else "rollout")
            if role not in ROLES:
                known = ", ".join(ROLES)
                raise AllocationError(f"'{one}': '{role}' is not a role; allowed: {known}")
            if role in found:
                raise AllocationError(f"'{components}': there are two layouts of the {role}")
            said = not apart and (start > 0 or BACKENDS[one.backend].serves)
            gpus = format_gpus(range(start, start + one.world_size)) if said else ""
            found[role] = Placed(str(_unnamed(str(one))), gpus)
        start += 0 if apart else place[0].world_size
    if "actor" not in found:
        raise AllocationError(f"'{components}': no part of it trains the actor")
    return found


def _unnamed(text: str) -> str:
    return re.sub(r"\[.*?\]", "", text)


def _position(error: AllocationError) -> int:
    found = re.search(r"at character (\d+)", str(error))
    return int(found[1]) if found else 0


def _written_twice(config: Config) -> Iterator[str]:
    for role in ROLES:
        section = getattr(config, role)
        if section is None:
            continue
        for field in ("backend", "gpus", "model"):
            if getattr(section, field, None):
                yield f"{role}.{field}"


def _placed(config: Config, placed: Mapping[str, Placed]) -> Config:
    update = {}
    for role, one in placed.items():
        section = getattr(config, role) or Model()
        update[role] = section.model_copy(update={"backend": one.backend, "gpus": one.gpus})
    return config.model_copy(update=update)
