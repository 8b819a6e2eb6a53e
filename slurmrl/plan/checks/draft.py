"""A configuration that its schemas accept, before the checks across them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slurmrl.allocation import Allocation
from slurmrl.config.schema import Config, Model
from slurmrl.config.source import KeyPath, Source
from slurmrl.errors import Problem
from slurmrl.plan.algorithms import Algorithm, uses_of
from slurmrl.plan.placement import Placement, placements


@dataclass(frozen=True)
class Draft:
    config: Config
    algorithm: Algorithm
    source: Source

    def models(self) -> Iterator[tuple[str, Model]]:
        """The roles that the algorithm uses, with their completed sections."""
        for use in uses_of(self.config, self.algorithm):
            yield use.role, getattr(self.config, use.role)

    def placements(self) -> dict[str, Placement]:
        """The placements of the models; invalid ones are left out."""
        uses = uses_of(self.config, self.algorithm)
        return placements(self.config, [use.role for use in uses])

    def allocations(self) -> dict[str, Allocation]:
        return {name: place.allocation for name, place in self.placements().items()}

    def writes(self, *key_path: str) -> bool:
        """Whether the user wrote something at this key, valid or not."""
        value = self.source.values
        for part in key_path:
            if not isinstance(value, dict) or value.get(part) in (None, ""):
                return False
            value = value[part]
        return True

    def problem(self, key_path: KeyPath, message: str) -> Problem:
        return self.source.problem(key_path, message)
