"""Checks that concern several sections, files or the needs of the algorithm.

Each check yields problems and never raises, so that the user sees all problems at once. To add a
check, write a function of a `Draft` and list it in CHECKS or SUBMISSION in ``plan/settings.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from slurmrl.config.allocation import Allocation
from slurmrl.config.schema import Config, Model
from slurmrl.config.source import KeyPath, Source
from slurmrl.errors import Problem
from slurmrl.plan.algorithms import Algorithm, uses_of
from slurmrl.plan.engine_rules import HF, lacking
from slurmrl.plan.estimates.call_costs import placed_models
from slurmrl.plan.placement import Placement, model_of


@dataclass(frozen=True)
class Draft:
    """A configuration to check, with its algorithm and the user's values."""

    config: Config
    algorithm: Algorithm
    source: Source

    def models(self) -> Iterator[tuple[str, Model]]:
        """Yield the roles that the algorithm uses, with their completed sections."""
        for use in uses_of(self.config, self.algorithm):
            yield use.role, self.config.model(use.role)

    @cached_property
    def trained(self) -> frozenset[str]:
        """Names of the roles that the algorithm trains."""
        return frozenset(use.role for use in self.algorithm.roles() if use.trained)

    def placements(self) -> dict[str, Placement]:
        """Return a mapping from models to their valid placements."""
        return placed_models(self)

    def allocations(self) -> dict[str, Allocation]:
        return {name: place.allocation for name, place in self.placements().items()}

    def lacks(self, name: str, capability: str) -> str:
        """Return why a role or generation lacks a capability.

        The reason is its engine, or the implementation of its model. Return an empty string if it
        has the capability, or if its layout is invalid.
        """
        allocation = self.allocations().get(name)
        kinds = [allocation.backend] if allocation is not None else []
        if model_of(self.config, name).implementation == HF:
            kinds.append(HF)
        return next((why for kind in kinds if (why := lacking(kind, capability))), "")

    def writes(self, *key_path: str) -> bool:
        """Return whether the user set a value at this key, valid or not."""
        return self.source.writes(*self._below_models(key_path))

    def problem(self, key_path: KeyPath, message: str) -> Problem:
        return self.source.problem(self._below_models(key_path), message)

    def reject(self, key_path: KeyPath, reason: str, value: object = None) -> Problem:
        """Return the problem ``VALUE is not allowed REASON``.

        ``reason`` begins with ``:``, or with words such as `` with rollout.tasks``. A string
        ``value`` gets quotes; None is left out.
        """
        return self.problem(key_path, f"{_shown(value)}is not allowed{reason}")

    def _below_models(self, key_path: KeyPath) -> KeyPath:
        """Return the key in the file. Keys of custom roles are in the section ``models`` there."""
        return ("models", *key_path) if key_path[0] in self.config.models else key_path


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"{str(value).lower()} "
    if isinstance(value, float):
        return f"{value:.12g} "
    return f"'{value}' " if isinstance(value, str) else f"{value} "
