"""The plan: the workers, the ranks that hold each model, and the ranks that run each call.

The submission of a trial writes the plan once, as JSON. Every process of the run reads the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from slurmrl.config.schema import WHOLE
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.calls import corrupt
from slurmrl.fsio.documents import MOST_COUNT
from slurmrl.plan.dataflow import Head, Method
from slurmrl.plan.estimates.call_costs import memory_of
from slurmrl.run.reports import TRAINERS


class _PlanPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GroupPlan(_PlanPart):
    """A group of workers with the same purpose and resources.

    A trainer's rank is host * workers_per_host + its index on the host. Every other group is
    elastic: each of its tasks is a separate world on one host.
    """

    name: str = TRAINERS
    hosts: int = Field(ge=0, le=MOST_COUNT)
    workers_per_host: int = Field(ge=0, le=MOST_COUNT)
    gpus_per_worker: int
    threads_per_worker: int
    cpus_per_worker: int
    mem_per_worker: str | None = None
    """Host memory in Slurm's notation; None uses the cluster's default."""
    links: int = Field(ge=0, le=MOST_COUNT)
    """Number of elements in the group's job array."""
    elastic: bool = False
    spares: int = Field(default=0, ge=0, le=MOST_COUNT)
    """Number of additional hosts in the group's job, as replacements of lost hosts."""
    tasks_per_host: int = Field(default=0, ge=0, le=MOST_COUNT)
    """Number of rollout tasks on each host of the trainers' job. The tasks use the GPUs after the
    trainers' GPUs."""
    slots_per_task: int = Field(default=1, ge=1, le=MOST_COUNT)
    """Number of GPUs of a rollout task, as a multiple of a worker's GPUs."""
    worker: str = "slurmrl.workers.worker.setup:build_trainer"
    """``module:function`` that makes the worker of a rank (see `workers.worker.orders`)."""

    @property
    def workers(self) -> int:
        return self.hosts * self.workers_per_host

    @property
    def world_size(self) -> int:
        """Number of ranks in one of the group's worlds (see `slurmrl.run.reports`)."""
        return self.hosts_of_job * self.workers_per_host

    @property
    def slots_per_host(self) -> int:
        """Number of workers for which the job has GPUs, cores and memory on each host."""
        return self.workers_per_host + self.tasks_per_host * self.slots_per_task

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of host memory that the job requests for a worker; None without a request."""
        return memory_of(self.mem_per_worker) if self.mem_per_worker else None

    @property
    def hosts_of_job(self) -> int:
        """Number of hosts of one job. Each task of an elastic group is a job on one host."""
        return 1 if self.elastic else self.hosts


class ModelPlan(_PlanPart):
    """The layout and the placement of one role's model.

    ``ranks[i]`` is the worker of the group that holds the model's i-th rank, in row-major order of
    the axes in ``sizes``. Tensor-parallel ranks are adjacent. Workers are counted host by host. A
    trainer's worker number is its rank.
    """

    role: str
    backend: str
    engine: str
    sizes: dict[str, int]
    ranks: tuple[int, ...]
    trained: bool
    head: Head
    group: str = TRAINERS
    """Name of the group of workers that holds the model."""
    expert_sizes: dict[str, int] = {}
    """Sizes of the experts' layout over the same ranks, also row-major; empty without experts."""
    virtual_pipeline: int = 1
    sequence_parallel: bool = False
    averaged: bool = False
    """Whether the weights are a moving average of another model's weights."""

    @property
    def changes(self) -> bool:
        """Whether the weights change during a run, so that checkpoints hold them."""
        return self.trained or self.averaged


class Reallocation(_PlanPart):
    """The move of one model's weights into the layout of another model of the plan.

    The weights move if they have changed since their last move.
    """

    source: str
    target: str
    eta: float = 1.0
    """Factor of the source in the new target, ``eta * source + (1 - eta) * target``."""

    def __str__(self) -> str:
        share = "" if self.eta == 1.0 else f" (ema {self.eta:g})"
        return f"reallocate {self.source} -> {self.target}{share}"


class Offloading(_PlanPart):
    """An action that frees the device memory of a model until its next use.

    The weights of a role move to host memory. The copy of the actor's weights for generation is
    discarded.
    """

    model: str

    def __str__(self) -> str:
        return f"offload {self.model}"


class CallPlan(_PlanPart):
    """One call of the graph and the ranks that execute it.

    Data-parallel ranks get balanced parts of the batch. Ranks that differ only along other axes
    work on equal parts.
    """

    name: str
    role: str | None
    method: Method
    interface: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ranks: tuple[int, ...]
    layout: str | None = None
    """Name of the model whose layout the call uses; None for the layout of its role."""
    base: bool = False
    """Whether the call runs on the model ``layout`` without its adapters."""
    pre_hooks: tuple[Reallocation, ...] = ()
    """Actions of the ranks of both layouts before the call."""
    post_hooks: tuple[Reallocation | Offloading, ...] = ()
    """Actions of the ranks of the models involved after the call."""


class Plan(_PlanPart):
    """The plan of a trial. Every rank executes the calls in their order."""

    version: Literal[1] = 1
    experiment: str
    trial: str
    groups: tuple[GroupPlan, ...]
    models: dict[str, ModelPlan]
    calls: tuple[CallPlan, ...]
    evaluation_calls: tuple[CallPlan, ...]
    """Calls of an evaluation without suites."""
    suite_calls: dict[str, tuple[CallPlan, ...]] = {}
    """Mapping from a suite's name to the calls of its evaluation."""

    @model_validator(mode="after")
    def _has_trainers(self) -> Plan:
        names = [group.name for group in self.groups]
        if names.count(TRAINERS) != 1 or len(set(names)) < len(names):
            raise ValueError(f"groups {names} must include '{TRAINERS}' and have different names")
        wrong = [group.name for group in self.groups if group.elastic == (group.name == TRAINERS)]
        if wrong:
            raise ValueError(f"groups {wrong}: all groups except '{TRAINERS}' must be elastic")
        return self

    @property
    def all_calls(self) -> tuple[CallPlan, ...]:
        """Calls of a step and of all evaluations."""
        suites = (call for calls in self.suite_calls.values() for call in calls)
        return (*self.calls, *self.evaluation_calls, *suites)

    def evaluation(self, suite: str) -> tuple[CallPlan, ...]:
        """Return the calls of the evaluation of a suite, which may be `WHOLE`."""
        return self.evaluation_calls if suite == WHOLE else self.suite_calls[suite]

    @property
    def filtered(self) -> int:
        """Number of a step's calls up to and including the filter; 0 without a filter."""
        numbers = (n for n, call in enumerate(self.calls, 1) if call.method is Method.FILTER)
        return max(numbers, default=0)

    @property
    def trainers(self) -> GroupPlan:
        return self.group(TRAINERS)

    @property
    def jobs(self) -> tuple[GroupPlan, ...]:
        """Groups with separate jobs. Rollout tasks may run in the trainers' job."""
        inside = self.trainers.tasks_per_host > 0
        return (self.trainers,) if inside else self.groups

    @property
    def hosts(self) -> int:
        """Number of hosts, counting tasks in the trainers' job as hosts, because tasks poll."""
        return sum(group.hosts for group in self.groups)

    def models_of(self, group: str) -> dict[str, ModelPlan]:
        """Return the models that the workers of a group hold, in the plan's order."""
        return {name: model for name, model in self.models.items() if model.group == group}

    @property
    def offloaded(self) -> frozenset[str]:
        """Names of the models that are offloaded between calls."""
        return frozenset(hook.model for hook in self._hooks if isinstance(hook, Offloading))

    @property
    def generating(self) -> frozenset[str]:
        """Names of the models to whose layout weights move before a call."""
        return frozenset(hook.target for call in self.all_calls for hook in call.pre_hooks)

    @property
    def reallocations(self) -> tuple[Reallocation, ...]:
        """All distinct reallocations, in the same order in every process."""
        found = (hook for hook in self._hooks if isinstance(hook, Reallocation))
        return tuple(dict.fromkeys(found))

    @property
    def _hooks(self) -> list[Reallocation | Offloading]:
        return [hook for call in self.all_calls for hook in (*call.pre_hooks, *call.post_hooks)]

    def group(self, name: str) -> GroupPlan:
        """Return the group with this name. Raises KeyError for an unknown name."""
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
        """Return the plan in a file. Raises CorruptFileError, EnvironmentFailure."""
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
    """Return the first problem in a plan with its location."""
    details = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, details['loc']))}: {details['msg']}"
