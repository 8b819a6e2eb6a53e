"""The plan: the workers, the ranks that hold each model, and the ranks that run each call.

It is written once, as JSON, when a trial is submitted; every process of the run reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.failures import corrupt
from slurmrl.fsio.shapes import MOST_COUNT
from slurmrl.graph.call import Head, Method
from slurmrl.plan.estimates.hardware import memory_of


class _PlanPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GroupPlan(_PlanPart):
    """Workers of one kind and shape. Global rank = host * workers_per_host + index on the host."""

    name: str = "trainer"
    hosts: int = Field(ge=0, le=MOST_COUNT)
    workers_per_host: int = Field(ge=0, le=MOST_COUNT)
    gpus_per_worker: int
    threads_per_worker: int
    cpus_per_worker: int
    mem_per_worker: str | None = None
    """Host memory in Slurm's notation; None leaves it to the cluster."""
    links: int = Field(ge=0, le=MOST_COUNT)
    """Elements of its job array."""
    elastic: bool = False

    @property
    def world_size(self) -> int:
        return self.hosts * self.workers_per_host

    @property
    def memory_bytes(self) -> int | None:
        """Host memory that is requested for a worker."""
        return memory_of(self.mem_per_worker) if self.mem_per_worker else None

    @property
    def hosts_of_job(self) -> int:
        """Hosts that one job needs: each task of an elastic group is a job on one host."""
        return 1 if self.elastic else self.hosts


class ModelPlan(_PlanPart):
    """One role's placement. ``ranks[i]`` is the rank within its group of workers that holds the
    model's i-th rank, in row-major order of the axes in ``sizes``: tensor-parallel ranks are
    adjacent."""

    role: str
    backend: str
    engine: str
    sizes: dict[str, int]
    ranks: tuple[int, ...]
    trained: bool
    head: Head
    group: str = "trainer"
    """The group of workers that holds it."""
    expert_sizes: dict[str, int] = {}
    """The experts' own grid over the same ranks, also row-major; empty where there is none."""
    virtual_pipeline: int = 1
    sequence_parallel: bool = False


class Reallocation(_PlanPart):
    """The weights of one model of the plan go into the layout of another one, if they have changed
    since they did so last."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"reallocate {self.source} -> {self.target}"


class CallPlan(_PlanPart):
    """One call of the graph and the ranks that execute it. Data-parallel ranks get equal parts of
    the batch; ranks that differ only along other axes work on the same part."""

    name: str
    role: str | None
    method: Method
    interface: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ranks: tuple[int, ...]
    layout: str | None = None
    """The model of the plan whose layout it runs on, if that is not the role's own."""
    pre_hooks: tuple[Reallocation, ...] = ()
    """What the ranks of both layouts do before the call."""


class Plan(_PlanPart):
    """Calls are in the order in which every rank executes them."""

    version: Literal[1] = 1
    experiment: str
    trial: str
    groups: tuple[GroupPlan, ...]
    models: dict[str, ModelPlan]
    calls: tuple[CallPlan, ...]
    evaluation_calls: tuple[CallPlan, ...]

    @property
    def world_size(self) -> int:
        """Workers of all fixed groups."""
        return sum(group.world_size for group in self.groups if not group.elastic)

    def group(self, name: str) -> GroupPlan:
        """Raises KeyError for an unknown name."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        return Plan.model_validate_json(text)

    @staticmethod
    def read(path: Path) -> Plan:
        """Raises CorruptFileError, EnvironmentFailure."""
        try:
            data = atomic.read(path)
        except FileNotFoundError as error:
            raise EnvironmentFailure(f"{path} is missing") from error
        documents.parse(data, path)
        try:
            return Plan.from_json(data)
        except ValidationError as error:
            raise corrupt(path, f"is not a plan: {_first(error)}") from error


def _first(error: ValidationError) -> str:
    """The first problem with its location."""
    details = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, details['loc']))}: {details['msg']}"
