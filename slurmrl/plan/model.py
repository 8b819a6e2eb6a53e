"""The plan: the workers, the ranks that hold each model, and the ranks that run each call.

It is written once, as JSON, when a trial is submitted; every process of the run reads it.
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
    """Workers of one kind and shape.

    The trainers' rank = host * workers_per_host + index on the host. Every other group is elastic:
    each of its tasks is a separate world on one host.
    """

    name: str = TRAINERS
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
    spares: int = Field(default=0, ge=0, le=MOST_COUNT)
    """Additional hosts of its job, which replace lost hosts."""
    tasks_per_host: int = Field(default=0, ge=0, le=MOST_COUNT)
    """Rollout tasks that run in the trainers' job: on the GPUs of each host after the trainers'
    GPUs."""
    slots_per_task: int = Field(default=1, ge=1, le=MOST_COUNT)
    """GPUs of such a task, as a multiple of a worker's GPUs."""
    worker: str = "slurmrl.workers.worker.setup:build_trainer"
    """``module:function`` that makes the worker of a rank (see `workers.worker.orders`)."""

    @property
    def workers(self) -> int:
        return self.hosts * self.workers_per_host

    @property
    def world_size(self) -> int:
        """Ranks of one of its worlds (see `slurmrl.run.reports`)."""
        return self.hosts_of_job * self.workers_per_host

    @property
    def slots_per_host(self) -> int:
        """Workers for which its job has GPUs, cores and memory on each host."""
        return self.workers_per_host + self.tasks_per_host * self.slots_per_task

    @property
    def memory_bytes(self) -> int | None:
        """Host memory that is requested for a worker."""
        return memory_of(self.mem_per_worker) if self.mem_per_worker else None

    @property
    def hosts_of_job(self) -> int:
        """Hosts that one job needs: each task of an elastic group is a job on one host."""
        return 1 if self.elastic else self.hosts


class ModelPlan(_PlanPart):
    """One role's placement.

    ``ranks[i]`` is the worker of its group that holds the model's i-th rank, in row-major order of
    the axes in ``sizes``: tensor-parallel ranks are adjacent. Workers are counted host by host; the
    trainers' workers are their ranks.
    """

    role: str
    backend: str
    engine: str
    sizes: dict[str, int]
    ranks: tuple[int, ...]
    trained: bool
    head: Head
    group: str = TRAINERS
    """The group of workers that holds it."""
    expert_sizes: dict[str, int] = {}
    """The experts' own grid over the same ranks, also row-major; empty where there is none."""
    virtual_pipeline: int = 1
    sequence_parallel: bool = False
    averaged: bool = False
    """Whether its weights are a moving average of another model's, which checkpoints hold."""

    @property
    def changes(self) -> bool:
        """Whether its weights change during a run, so that checkpoints hold them."""
        return self.trained or self.averaged


class Reallocation(_PlanPart):
    """The move of one model's weights into the layout of another model of the plan.

    The weights move if they have changed since their last move.
    """

    source: str
    target: str
    eta: float = 1.0
    """The target becomes ``eta * source + (1 - eta) * target``."""

    def __str__(self) -> str:
        share = "" if self.eta == 1.0 else f" (ema {self.eta:g})"
        return f"reallocate {self.source} -> {self.target}{share}"


class Offloading(_PlanPart):
    """The device memory of a model of the plan is free until its next use.

    A trained or frozen model waits in host memory; generation's copy of another model's weights is
    discarded once another model computes.
    """

    model: str

    def __str__(self) -> str:
        return f"offload {self.model}"


class CallPlan(_PlanPart):
    """One call of the graph and the ranks that execute it.

    Data-parallel ranks get balanced parts of the batch; ranks that differ only along other axes
    work on the same part.
    """

    name: str
    role: str | None
    method: Method
    interface: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ranks: tuple[int, ...]
    layout: str | None = None
    """The model whose layout the call uses, if it does not use the layout of its role."""
    base: bool = False
    """Whether it runs on that model without its adapters."""
    pre_hooks: tuple[Reallocation, ...] = ()
    """Actions of the ranks of both layouts before the call."""
    post_hooks: tuple[Reallocation | Offloading, ...] = ()
    """Actions of the ranks of the models concerned after it."""


class Plan(_PlanPart):
    """Calls are in the order in which every rank executes them."""

    version: Literal[1] = 1
    experiment: str
    trial: str
    groups: tuple[GroupPlan, ...]
    models: dict[str, ModelPlan]
    calls: tuple[CallPlan, ...]
    evaluation_calls: tuple[CallPlan, ...]
    """Calls of an evaluation without suites."""
    suite_calls: dict[str, tuple[CallPlan, ...]] = {}
    """Calls of the evaluation of each suite, by its name."""

    @model_validator(mode="after")
    def _has_trainers(self) -> Plan:
        names = [group.name for group in self.groups]
        if names.count(TRAINERS) != 1 or len(set(names)) < len(names):
            raise ValueError(f"groups {names}: one of them must be '{TRAINERS}', none may repeat")
        wrong = [group.name for group in self.groups if group.elastic == (group.name == TRAINERS)]
        if wrong:
            raise ValueError(f"groups {wrong}: all groups but '{TRAINERS}' must be elastic")
        return self

    @property
    def all_calls(self) -> tuple[CallPlan, ...]:
        """The calls of a step and of all evaluations."""
        suites = (call for calls in self.suite_calls.values() for call in calls)
        return (*self.calls, *self.evaluation_calls, *suites)

    def evaluation(self, suite: str) -> tuple[CallPlan, ...]:
        """The calls of the evaluation of a suite, in the order of `Config.evaluations`."""
        return self.evaluation_calls if suite == WHOLE else self.suite_calls[suite]

    @property
    def filtered(self) -> int:
        """The number of a step's calls that candidates go through, up to the filter.

        0 without a filter.
        """
        numbers = (n for n, call in enumerate(self.calls, 1) if call.method is Method.FILTER)
        return max(numbers, default=0)

    @property
    def trainers(self) -> GroupPlan:
        return self.group(TRAINERS)

    @property
    def jobs(self) -> tuple[GroupPlan, ...]:
        """The groups with separate jobs. Rollout tasks may run in the trainers' job."""
        inside = self.trainers.tasks_per_host > 0
        return (self.trainers,) if inside else self.groups

    @property
    def hosts(self) -> int:
        """Hosts of all groups. Tasks in the trainers' job count too: each polls for itself."""
        return sum(group.hosts for group in self.groups)

    def models_of(self, group: str) -> dict[str, ModelPlan]:
        """Return the models that the workers of a group hold, in the plan's order."""
        return {name: model for name, model in self.models.items() if model.group == group}

    @property
    def offloaded(self) -> frozenset[str]:
        """The models that are offloaded between calls."""
        return frozenset(hook.model for hook in self._hooks if isinstance(hook, Offloading))

    @property
    def generating(self) -> frozenset[str]:
        """The models whose weights move there before a call."""
        return frozenset(hook.target for call in self.all_calls for hook in call.pre_hooks)

    @property
    def reallocations(self) -> tuple[Reallocation, ...]:
        """All reallocations, each once, in the same order in every process."""
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
        """Read a plan. Raises CorruptFileError, EnvironmentFailure."""
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
