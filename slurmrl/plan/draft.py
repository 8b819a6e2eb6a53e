"""A configuration whose shape is right, on its way to being accepted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slurmrl.allocation import Allocation, parse
from slurmrl.config.schema import Config, Model
from slurmrl.config.source import KeyPath, Source
from slurmrl.errors import AllocationError, Problem
from slurmrl.plan.algorithms import Algorithm
from slurmrl.plan.engines import rules_of


@dataclass(frozen=True)
class Draft:
    config: Config
    algorithm: Algorithm
    source: Source

    def models(self) -> Iterator[tuple[str, Model]]:
        """The roles that the algorithm uses, with their completed sections."""
        for use in self.algorithm.roles():
            yield use.role, getattr(self.config, use.role)

    def allocations(self) -> dict[str, Allocation]:
        """The roles' allocations, those that are right and have an engine."""
        allocations = {}
        for role, model in self.models():
            try:
                allocation = parse(model.backend)
                rules_of(allocation)
            except AllocationError:
                continue
            allocations[role] = allocation
        return allocations

    def writes(self, *key_path: str) -> bool:
        """Whether the user wrote something at this key, right or wrong."""
        value = self.source.values
        for part in key_path:
            if not isinstance(value, dict) or value.get(part) in (None, ""):
                return False
            value = value[part]
        return True

    def problem(self, key_path: KeyPath, message: str) -> Problem:
        return self.source.problem(key_path, message)
