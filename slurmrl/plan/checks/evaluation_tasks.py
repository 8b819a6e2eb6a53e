"""Checks of evaluations in trials of their own (`evaluation.tasks`): they are submitted when nobody
looks, so what they would refuse is refused now."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from slurmrl.config.allocation import parse
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.schema import evaluation_key
from slurmrl.errors import AllocationError, Problem
from slurmrl.plan.algorithms import Algorithm
from slurmrl.plan.checks import fit
from slurmrl.plan.checks.draft import Draft
from slurmrl.plan.checks.tasks import wrong_slurm
from slurmrl.plan.dataflow import REWARD_MODEL, Call, Method
from slurmrl.plan.engine_rules import ENGINES, rules_of
from slurmrl.plan.estimates.shape import shape_of
from slurmrl.run.paths import EVALUATED

TASKS: Final = ("evaluation", "tasks")
LONGEST_SUITE: Final = 40
"""How many of a name's 64 characters ``-step-123456789-`` leaves (`desk.evaluating`)."""
LONGEST_EXPERIMENT: Final = 64 - len(EVALUATED)
MEASURED: Final = ("prompt", "prompt_answer", "messages")
"""Types of dataset on which `evaluate` measures any model."""


def evaluation_tasks(draft: Draft) -> Iterator[Problem]:
    config, algorithm = draft.config, draft.algorithm
    settings = config.evaluation.tasks if config.evaluation is not None else None
    if settings is None:
        return
    if not any(use.role == "actor" and use.trained for use in algorithm.roles()):
        message = f"is not allowed: {algorithm.name} trains no actor whose checkpoints could be"
        yield draft.problem(TASKS, f"{message} evaluated")
    kinds = _measured(algorithm)
    for suite, own in config.evaluations.items():
        if own.held_out.kind not in kinds:
            message = (
                f"'{own.held_out.type}' is not allowed with evaluation.tasks and "
                f"{algorithm.name}; allowed: {', '.join(kinds)}. Without evaluation.tasks the "
                "trainers evaluate on it"
            )
            yield draft.problem((*evaluation_key(suite), "dataset", "type"), message)
    yield from _names(draft)
    used = {call.role for call in _calls(draft)}
    if REWARD_MODEL in used and config.reward_model is None:
        message = "is required: the reward of an evaluation asks this model"
        yield draft.problem((REWARD_MODEL,), message)
    yield from wrong_slurm(draft, settings.slurm, (*TASKS, "slurm"))
    yield from _backend(draft, settings.backend)


def _names(draft: Draft) -> Iterator[Problem]:
    """Those of the trials, from which each step of each suite has to be told."""
    for suite in draft.config.evaluations:
        if len(suite) > LONGEST_SUITE:
            message = f"a suite has at most {LONGEST_SUITE} characters with evaluation.tasks"
            yield draft.problem(evaluation_key(suite), message)
    if len(draft.config.experiment) > LONGEST_EXPERIMENT:
        message = (
            f"has at most {LONGEST_EXPERIMENT} characters with evaluation.tasks: the experiment "
            f"of the evaluations has '{EVALUATED}' behind it"
        )
        yield draft.problem(("experiment",), message)


def _calls(draft: Draft) -> Iterator[Call]:
    for config in draft.config.evaluations.values():
        yield from draft.algorithm.evaluation_calls(config)


def _measured(algorithm: Algorithm) -> tuple[str, ...]:
    return ("preference",) if algorithm.name == REWARD_MODEL else MEASURED


def _backend(draft: Draft, text: str) -> Iterator[Problem]:
    """The layout there, which is also that of generation unless this has an engine of its own."""
    own = draft.allocations().get("actor")
    if not text and own is None:
        return  # that of the actor is reported at the actor
    where = (*TASKS, "backend")
    try:
        allocation = parse(text) if text else own
        assert allocation is not None, "see above"
        if not BACKENDS[allocation.backend].trains:
            able = ", ".join(name for name, engine in BACKENDS.items() if engine.trains)
            message = f"'{text}' is not allowed: it is the layout of the actor; allowed: {able}"
            yield draft.problem(where, message)
            return
        rules = rules_of(allocation)
    except AllocationError as error:
        yield draft.problem(where, str(error))
        return
    size, batch = allocation.sizes["dp"], draft.algorithm.batch_size
    if text and batch % size:
        message = f"'{text}' is not allowed: algorithm.batch_size {batch} must be a multiple of its"
        yield draft.problem(where, f"{message} data-parallel size {size}")
    model = draft.config.actor.model_copy(update={"model": None})
    wanted = fit.Fit(model, allocation, shape_of(model), None)
    for misfit in islice(fit.check(wanted) if text else (), 1):
        value = misfit.value or f"'{text}'"
        yield draft.problem(where, f"{value} is not allowed: {misfit.reason}")
    others = draft.config.evaluation_trials_roll_out
    generates = any(call.method is Method.GENERATE for call in _calls(draft))
    if generates and not others and not rules.generates:
        able = ", ".join(
            name for name, other in ENGINES.items() if other.generates and BACKENDS[name].trains
        )
        message = (
            f"'{allocation}' is not allowed: the evaluation generates, which "
            f"{allocation.backend} cannot; allowed: {able}"
        )
        yield draft.problem(where, message)
