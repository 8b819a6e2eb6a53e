"""Reasons why a search found no combination."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from slurmrl.plan.estimates.call_costs import binary_size, memory_bytes
from slurmrl.plan.settings import Settings
from slurmrl.search.best_layouts import SearchRequest, parts_of, ways
from slurmrl.search.candidates import least_memory

MOST_SIZES: Final = 3
"""Maximum number of GPU counts for which a reason is shown."""


class _Obstacle(NamedTuple):
    """The first condition that a way to use the GPUs does not meet."""

    met: int
    """Number of conditions that the way meets."""
    words: str


def reasons(checked: Settings, request: SearchRequest, rejected: Sequence[str]) -> list[str]:
    """Return a sentence about each number of GPUs, or ``rejected`` if it is not empty.

    ``rejected`` has the reasons why combinations that fit into memory cannot be submitted.
    """
    if rejected:
        return list(rejected)
    return [
        f"with {_count(gpus)}: {max(_obstacles(checked, request, gpus)).words}"
        for gpus in request.gpus[:MOST_SIZES]
    ]


def _count(gpus: int) -> str:
    return f"{gpus} GPU" + ("s" if gpus > 1 else "")


def _placed(name: str, gpus: int) -> str:
    return f"{name} on {_count(gpus)}"


def _obstacles(checked: Settings, request: SearchRequest, gpus: int) -> Iterator[_Obstacle]:
    """Yield an obstacle for each way to use a number of GPUs."""
    limit = memory_bytes(checked.config.cluster)
    yield _Obstacle(0, "no engine can run the models")
    for scheme in ways(checked, request, gpus):
        started, parts = parts_of(checked, request, scheme)
        found = [
            (part.name, part.gpus, least_memory(started, part.name, part.gpus, part.engines))
            for part in parts
        ]
        batch = checked.algorithm.batch_size
        none = [_placed(name, count) for name, count, least in found if least is None]
        if none:
            yield _Obstacle(
                1,
                f"no layout of {none[0]} divides its heads, its layers and the batch of {batch}",
            )
            continue
        name, count, least = max(found, key=lambda one: one[2] or 0)
        if limit is not None and least is not None and least > limit:
            needs = f"{binary_size(least)} of a GPU, which has {binary_size(limit)}"
            yield _Obstacle(2, f"{_placed(name, count)} needs at least {needs}")
        elif math.isfinite(request.gpu_seconds):
            words = (
                "a step needs more GPU hours than allowed, or all models more memory than a GPU has"
            )
            yield _Obstacle(3, words)
        else:
            yield _Obstacle(3, "the models together need more memory than a GPU has")
