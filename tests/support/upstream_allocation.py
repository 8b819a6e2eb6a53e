"""Our allocations under the names of AReaL's module, to run its cases."""

from __future__ import annotations

from dataclasses import dataclass

from slurmrl.config.allocation import Allocation, parse
from slurmrl.errors import AllocationError


class AllocationValidationError(Exception):
    """A string whose dimensions break a rule."""


class InvalidAllocationModeError(Exception):
    """Halves that need different numbers of ranks."""


@dataclass(frozen=True)
class ParallelStrategy:
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    context_parallel_size: int
    expert_parallel_size: int
    expert_tensor_parallel_size: int
    expert_data_parallel_size: int
    world_size: int


@dataclass(frozen=True)
class ModelAllocation:
    backend: str
    name: str | None
    parallel: ParallelStrategy

    @staticmethod
    def from_str(text: str, name: str | None = None) -> ModelAllocation:
        try:
            found = parse(text)
        except AllocationError as error:
            raise _theirs(str(error)) from error
        return ModelAllocation(found.backend, name or found.name or None, _strategy(found))


def _strategy(found: Allocation) -> ParallelStrategy:
    return ParallelStrategy(
        tensor_parallel_size=found.sizes["tp"],
        pipeline_parallel_size=found.sizes["pp"],
        data_parallel_size=found.sizes["dp"],
        context_parallel_size=found.sizes["cp"],
        expert_parallel_size=found.sizes["ep"],
        expert_tensor_parallel_size=found.etp,
        expert_data_parallel_size=found.edp,
        world_size=found.world_size,
    )


def _theirs(message: str) -> Exception:
    if "must be the same number" in message:
        return InvalidAllocationModeError(message)
    if any(rule in message for rule in ("has no dimension", "unknown backend", "same p", "divide")):
        return AllocationValidationError(message)
    return ValueError(message)
