"""A configuration that its schemas accept, before the checks across them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slurmrl.config.allocation import Allocation
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
            yield use.role, self.config.model(use.role)

    def placements(self) -> dict[str, Placement]:
        """The placements of the models; invalid ones are left out."""
        uses = uses_of(self.config, self.algorithm)
        return placements(self.config, [use.role for use in uses])

    def allocations(self) -> dict[str, Allocation]:
        return {name: place.allocation for name, place in self.placements().items()}

    def writes(self, *key_path: str) -> bool:
        """Whether the user wrote something at this key, valid or not."""
        return self.source.writes(*self._below_models(key_path))

    def problem(self, key_path: KeyPath, message: str) -> Problem:
        return self.source.problem(self._below_models(key_path), message)

    def _below_models(self, key_path: KeyPath) -> KeyPath:
        """The key in the file of one that begins with a role."""
        return ("models", *key_path) if key_path[0] in self.config.models else key_path
