"""Settings that roles inherit, and each role's layout in one spelling.

Roles inherit from the actor and from the kind of device (GPUs of a worker, the precision).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from slurmrl.config.allocation import parse
from slurmrl.config.allocation.parser import parse_gpus
from slurmrl.config.schema import Cluster, Config, Model, Publish, Rollout, role_key
from slurmrl.config.source import Source
from slurmrl.errors import AllocationError, Problem
from slurmrl.plan.algorithms import Algorithm, uses_of
from slurmrl.plan.resolve import spellings
from slurmrl.plan.resolve.spellings import shape_of

DEFAULT_ENGINE: Final = "fsdp"
DEFAULT_BACKEND: Final = "fsdp:d1"
TASKS_BACKEND: Final = "native:d1"
OWN_WEIGHTS: Final = ("teacher", "reward_model")
"""Roles that never start from the actor's weights: a copy of the actor teaches nothing."""
INHERITED: Final = (
    "implementation",
    "dtype",
    "gradient_checkpointing",
    "transformer_engine",
    "max_tokens_per_microbatch",
)


def complete(config: Config, algorithm: Algorithm, source: Source) -> tuple[Config, list[Problem]]:
    """Return the configuration with all sections and layouts, and the problems.

    It has a complete section for every role that the algorithm uses, and every layout as a string.
    The problems are layouts whose two spellings disagree.
    """
    problems: list[Problem] = []
    actor = config.actor.model_copy(
        update={
            "backend": config.actor.backend or _default(config.actor),
            "tokenizer": config.actor.tokenizer or config.actor.path,
        }
    )
    roles = {use.role: _from_actor(config, use.role, actor) for use in uses_of(config, algorithm)}
    roles["actor"] = actor
    for role, model in roles.items():
        inherits = role != "actor" and model.model is actor.model
        merged, conflicts = _merged(config, model)
        roles[role] = merged
        if not inherits:
            problems += [
                source.problem((*role_key(role), "model", conflict.field), conflict.message)
                for conflict in conflicts
            ]
    config = config.model_copy(update={"rollout": _with_completions(config.rollout, algorithm)})
    config = _with_pass_score(config)
    if algorithm.one_pass:
        config = _for_one_pass(config)
    rollout, conflicts = _rollout(config)
    problems += [
        source.problem(("rollout", conflict.field), conflict.message) for conflict in conflicts
    ]
    return config.with_models(roles).model_copy(update={"rollout": rollout}), problems


def _with_completions(rollout: Rollout, algorithm: Algorithm) -> Rollout:
    """The rollout with the algorithm's number of completions for each prompt, if it sets none.

    (Greedy ones would all be the same.)
    """
    if "n" in rollout.model_fields_set or rollout.greedy:
        return rollout
    return rollout.model_copy(update={"n": algorithm.completions})


def _with_pass_score(config: Config) -> Config:
    """The configuration with what counts as correct in evaluations, where rewards tell it."""
    evaluation = config.evaluation
    if evaluation is None or evaluation.pass_score is not None:
        return config
    update: dict[str, Any] = {"pass_score": config.default_pass_score}
    if evaluation.suites:  # each has its own, as its reward may be another one
        evaluations = config.evaluations
        update = {
            "suites": {
                name: suite.model_copy(update={"pass_score": evaluations[name].default_pass_score})
                if suite.pass_score is None
                else suite
                for name, suite in evaluation.suites.items()
            }
        }
    return config.model_copy(update={"evaluation": evaluation.model_copy(update=update)})


def _for_one_pass(config: Config) -> Config:
    """Return a configuration with the rows in file order, and a commit after each step.

    The user's own choices stay. The results of a step are worth more than the commit costs.
    """
    dataset, checkpoint = config.dataset, config.checkpoint
    if "shuffle" not in dataset.model_fields_set:
        dataset = dataset.model_copy(update={"shuffle": False})
    if checkpoint.model_fields_set.isdisjoint(("every_steps", "every_seconds", "every_epochs")):
        checkpoint = checkpoint.model_copy(update={"every_steps": 1})
    return config.model_copy(update={"dataset": dataset, "checkpoint": checkpoint})


def _default(model: Model) -> str:
    return DEFAULT_ENGINE if spellings.given(model) else DEFAULT_BACKEND


def _from_actor(config: Config, role: str, actor: Model) -> Model:
    model: Model = config.find_model(role) or Model()
    update: dict[str, Any] = {
        name: getattr(actor, name) for name in INHERITED if name not in model.model_fields_set
    }
    update |= _layout_from_actor(model, actor)
    update["tokenizer"] = model.tokenizer or actor.tokenizer
    if model.path is None and model.architecture is None and role not in OWN_WEIGHTS:
        update |= {"path": actor.path, "architecture": actor.architecture}
    return model.model_copy(update=update)


def _layout_from_actor(model: Model, actor: Model) -> dict[str, Any]:
    """The whole layout, or only the engine if the role has sizes of its own."""
    if model.backend:
        return {}
    if spellings.given(model):
        return {"backend": actor.backend.partition(":")[0]}
    return {
        "backend": actor.backend,
        "gpus": model.gpus or actor.gpus,
        "model": model.model or actor.model,
    }


def _merged(config: Config, model: Model) -> tuple[Model, list[spellings.Disagreement]]:
    shape = shape_of(config)
    gpus = shape.hosts * shape.gpus_per_host if config.cluster.hosts else None
    backend, found = spellings.merge(model.backend, spellings.given(model), gpus)
    conflicts = [spellings.Disagreement(spellings.FIELDS[axis], message) for axis, message in found]
    return model.model_copy(update={"backend": backend}), conflicts


def _rollout(config: Config) -> tuple[Any, list[spellings.Disagreement]]:
    rollout = _of_tasks(config.rollout)
    given = spellings.given_rollout(rollout)
    if given and not rollout.backend:
        axis, size = next(iter(given.items()))
        message = f"{size} is not allowed without rollout.backend, the engine that it applies to"
        return rollout, [spellings.Disagreement(spellings.ROLLOUT_FIELDS[axis], message)]
    backend, found = spellings.merge(rollout.backend, given, None)
    if rollout.servers and spellings.is_engine_only(backend):
        backend = f"{backend.strip()}:d1"  # of the weights alone: the servers have their layouts
    if rollout.tasks is not None:
        backend = _for_each(backend, rollout.tasks.max, _listed(rollout.gpus))
    conflicts = [
        spellings.Disagreement(spellings.ROLLOUT_FIELDS[axis], message) for axis, message in found
    ]
    return rollout.model_copy(update={"backend": backend}), conflicts


def _of_tasks(rollout: Rollout) -> Rollout:
    """Tasks of their own have an engine, and get their weights as files."""
    if rollout.tasks is None:
        return rollout
    backend, publish = rollout.backend or TASKS_BACKEND, rollout.publish or Publish()
    return rollout.model_copy(update={"backend": backend, "publish": publish})


def _listed(gpus: str) -> int:
    """How many GPUs of the trainers' job tasks have; 0 if they have jobs of their own."""
    try:
        return len(parse_gpus(gpus)) if gpus.strip() else 0
    except AllocationError:
        return 0  # reported elsewhere


def _for_each(backend: str, tasks: int | None, gpus: int) -> str:
    """The layout of this many tasks, or of those that fill ``gpus``, from that of one or of all."""
    try:
        one = parse(f"{backend.strip()}:d1" if spellings.is_engine_only(backend) else backend)
    except AllocationError:
        return backend  # reported elsewhere
    count = tasks or gpus // one.instance_size
    if not count or one.sizes["dp"] > 1:
        return str(one)
    return str(replace(one, sizes={**one.sizes, "dp": count}))


FIRST_GPU: Final = Path("/dev/nvidia0")
ON_GPUS: Final = "bfloat16"
ON_CPUS: Final = "float32"
"""bfloat16 is slower than float32 on most CPUs."""


def gpus_per_worker(cluster: Cluster, scheduler: str) -> int:
    """GPUs of one worker. ``scheduler`` is ``"local"`` or ``"slurm"``."""
    if cluster.gpus_per_worker is not None:
        return cluster.gpus_per_worker
    return 1 if scheduler != "local" or FIRST_GPU.exists() else 0


def with_precision(config: Config, scheduler: str) -> Config:
    """Return the configuration with the actor's default precision, if the actor sets none.

    The other roles inherit it. (A resolved configuration sets all, so a trial keeps its precision.)
    """
    if "dtype" in config.actor.model_fields_set:
        return config
    dtype = ON_GPUS if gpus_per_worker(config.cluster, scheduler) else ON_CPUS
    return config.model_copy(update={"actor": config.actor.model_copy(update={"dtype": dtype})})
