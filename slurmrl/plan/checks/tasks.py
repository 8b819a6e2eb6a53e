"""Checks of generation in tasks of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pydantic import ValidationError

from slurmrl.config.allocation.parser import format_gpus, parse_gpus
from slurmrl.config.schema.cluster import SlurmOfTasks
from slurmrl.config.source import KeyPath
from slurmrl.errors import AllocationError, Problem
from slurmrl.plan.checks.draft import Draft
from slurmrl.plan.dataflow import Method
from slurmrl.plan.placement import ROLLOUTS, tasks_inside, trainers

OF_TRAINERS: Final = ("offload", "servers")
"""Settings of generation by the trainers, or by running servers."""


def tasks(draft: Draft) -> Iterator[Problem]:
    """Tasks generate for an algorithm that trains on completions, and no other engine does."""
    rollout, algorithm = draft.config.rollout, draft.algorithm
    settings = rollout.tasks
    if settings is None:
        if rollout.slurm != type(rollout.slurm)():
            message = "is not allowed without rollout.tasks: it is about their jobs"
            yield draft.problem((ROLLOUTS, "slurm"), message)
        return
    yield from wrong_slurm(draft, rollout.slurm, (ROLLOUTS, "slurm"))
    calls = algorithm.calls(draft.config)
    generating = [call for call in calls if call.method is Method.GENERATE]
    trains = any(use.role == "actor" and use.trained for use in algorithm.roles())
    if not generating or not trains:
        message = f"is not allowed: {algorithm.name} does not train on completions"
        yield draft.problem((ROLLOUTS, "tasks"), message)
    elif len(generating) > 1:
        message = (
            f"is not allowed: {algorithm.name} generates {len(generating)} times in a step "
            f"({', '.join(call.name for call in generating)}), tasks once"
        )
        yield draft.problem((ROLLOUTS, "tasks"), message)
    for field in OF_TRAINERS:
        if getattr(rollout, field) != type(rollout).model_fields[field].default:
            yield draft.problem((ROLLOUTS, field), "is not allowed with rollout.tasks")
    publish = rollout.publish
    if publish is not None and publish.every_steps > settings.max_staleness + 1:
        message = (
            f"{settings.max_staleness} is not allowed: weights are published every "
            f"{publish.every_steps} steps (rollout.publish.every_steps), so it must be at least "
            f"{publish.every_steps - 1}"
        )
        yield draft.problem((ROLLOUTS, "tasks", "max_staleness"), message)
    if draft.config.actor.implementation != "builtin":
        message = "is not allowed: tasks generate with the built-in decoder (actor.implementation)"
        yield draft.problem((ROLLOUTS, "tasks"), message)
    yield from _inside(draft)
    allocation = draft.allocations().get(ROLLOUTS)
    if allocation is None:
        return
    copies = allocation.sizes["dp"]
    if settings.max is not None and copies not in (1, settings.max):
        message = (
            f"{settings.max} is not allowed: rollout.backend '{rollout.backend}' says {copies} "
            "tasks; leave out one of them"
        )
        yield draft.problem((ROLLOUTS, "tasks", "max"), message)
    if settings.min > (most := settings.max or copies):
        message = f"{settings.min} is not allowed: at most {most} tasks run (rollout.tasks.max)"
        yield draft.problem((ROLLOUTS, "tasks", "min"), message)


def _inside(draft: Draft) -> Iterator[Problem]:
    """Tasks in the trainers' job have the GPUs behind those of its models."""
    rollout, placed = draft.config.rollout, draft.placements()
    workers, (tasks, size) = trainers(placed.values()), tasks_inside(draft.config, placed)
    if not workers or not tasks:
        return
    try:
        listed = parse_gpus(rollout.gpus)
    except AllocationError:
        return  # already reported
    behind = tuple(range(workers, workers + tasks * size))
    if len(listed) == len(behind) and listed != behind:
        message = (
            f"'{rollout.gpus}' is not allowed with rollout.tasks: the models of the trainers have "
            f"GPUs {format_gpus(range(workers))}, tasks those behind; write {format_gpus(behind)}"
        )
        yield draft.problem((ROLLOUTS, "gpus"), message)
    if rollout.slurm != type(rollout.slurm)():
        message = "is not allowed with rollout.gpus: the tasks are in the trainers' job"
        yield draft.problem((ROLLOUTS, "slurm"), message)


def wrong_slurm(draft: Draft, own: SlurmOfTasks, where: KeyPath) -> Iterator[Problem]:
    """Each option is allowed by itself; together with those of the trainers they may not be."""
    try:
        own.over(draft.config.cluster.slurm)
    except ValidationError as error:
        for details in error.errors():
            yield draft.problem(where, details["msg"].removeprefix("Value error, "))
