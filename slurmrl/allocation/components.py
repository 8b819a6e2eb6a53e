"""Several allocations in one string."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from slurmrl.allocation.allocation import Allocation
from slurmrl.errors import UnknownNameError
from slurmrl.registry import near


@dataclass(frozen=True)
class Components:
    """``places[i]`` are the allocations that share the i-th set of ranks. The sets are disjoint and
    consecutive. ``str`` gives a string that parses back to equal components."""

    places: tuple[tuple[Allocation, ...], ...]

    @property
    def world_size(self) -> int:
        """Number of ranks of all places together."""
        return sum(place[0].world_size for place in self.places)

    def __iter__(self) -> Iterator[Allocation]:
        return (allocation for place in self.places for allocation in place)

    def __len__(self) -> int:
        return sum(len(place) for place in self.places)

    def __getitem__(self, name: str) -> Allocation:
        """The component of that name. Raises UnknownNameError."""
        for allocation in self:
            if allocation.name == name:
                return allocation
        known = [allocation.name for allocation in self if allocation.name]
        raise UnknownNameError(f"no component '{name}'; {near(name, known)}")

    def starts(self) -> list[int]:
        """The first rank of each place."""
        sizes = [place[0].world_size for place in self.places]
        return list(accumulate(sizes[:-1], initial=0))

    def explain(self) -> dict[str, Any]:
        """The sizes as plain values; if there are several allocations, with their first ranks."""
        if len(self) == 1:
            return next(iter(self)).explain()
        parts = [
            {**allocation.explain(), "first_rank": start}
            for start, place in zip(self.starts(), self.places, strict=True)
            for allocation in place
        ]
        return {"string": str(self), "world_size": self.world_size, "components": parts}

    def __str__(self) -> str:
        return "+".join("|".join(map(str, place)) for place in self.places)
