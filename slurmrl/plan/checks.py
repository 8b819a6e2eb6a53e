"""What no schema can see alone: checks across sections, files and the algorithm's needs.

Each check yields problems and never raises, so that all of them are reported at once. To add one,
write a function like these and name it in CHECKS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from slurmrl.allocation import parse
from slurmrl.config.conditions import StopWhen
from slurmrl.config.schema import Dataset
from slurmrl.config.source import KeyPath
from slurmrl.errors import AllocationError, Problem, UsageError
from slurmrl.graph.call import Call
from slurmrl.graph.dataset import DATASET_KEYS
from slurmrl.graph.graph import Graph
from slurmrl.plan.draft import Draft
from slurmrl.plan.engines import rules_of
from slurmrl.plan.weights import tokenizer, weights
from slurmrl.registry import near, resolve

Check: TypeAlias = Callable[[Draft], Iterable[Problem]]

REWARDS: Final = "slurmrl.rewards:REWARDS"
"""The table of rewards. It stands above the plan and is looked at by name, as schemas are."""
OWN_REWARD: Final = re.compile(r"[\w.]+:\w+")
"""A user's own class, imported where the run is: its module may need torch."""


def check(draft: Draft) -> list[Problem]:
    return [problem for one in CHECKS for problem in one(draft)]


def _backends(draft: Draft) -> Iterator[Problem]:
    """A wrong backend is told once, at the role that wrote it."""
    for role, model in draft.models():
        if role != "actor" and not draft.writes(role, "backend"):
            continue
        try:
            rules_of(parse(model.backend))
        except AllocationError as error:
            yield draft.problem((role, "backend"), str(error))
    if draft.config.rollout.backend:
        message = (
            f"'{draft.config.rollout.backend}' is not allowed: the actor's own engine generates "
            "in this version; leave it empty"
        )
        yield draft.problem(("rollout", "backend"), message)


def _same_ranks(draft: Draft) -> Iterator[Problem]:
    allocations = draft.allocations()
    actor = allocations.get("actor")
    for role, allocation in allocations.items():
        if actor is not None and allocation.sizes != actor.sizes:
            message = (
                f"'{allocation}' is not allowed: in this version all models lie like the actor, "
                f"'{actor}'"
            )
            yield draft.problem((role, "backend"), message)


def _batches(draft: Draft) -> Iterator[Problem]:
    """Every data-parallel rank gets the same number of items, and at least one."""
    actor = draft.allocations().get("actor")
    if actor is None:
        return
    size = actor.sizes["dp"]
    if draft.algorithm.batch_size % size:
        message = (
            f"{draft.algorithm.batch_size} is not allowed: must be a multiple of {size}, the "
            f"data-parallel size of actor.backend '{actor}'"
        )
        yield draft.problem(("algorithm", "batch_size"), message)
    evaluation = draft.config.evaluation
    if evaluation is not None and evaluation.samples is not None and evaluation.samples < size:
        message = f"{evaluation.samples} is not allowed: must be at least {size}, one for each rank"
        yield draft.problem(("evaluation", "samples"), message)


def _datasets(draft: Draft) -> Iterator[Problem]:
    config = draft.config
    yield from _dataset(draft, config.dataset, ("dataset",), draft.algorithm.dataset_types)
    if config.evaluation is not None:
        where = ("evaluation", "dataset")
        types = draft.algorithm.evaluation_types
        yield from _dataset(draft, config.evaluation.dataset, where, types)


def _dataset(
    draft: Draft, dataset: Dataset, where: KeyPath, types: Sequence[str]
) -> Iterator[Problem]:
    if dataset.type not in types:
        task = "learns from" if where == ("dataset",) else "evaluates"
        message = (
            f"'{dataset.type}' is not allowed: {draft.algorithm.name} {task} {' or '.join(types)}"
        )
        yield draft.problem((*where, "type"), message)
    path = Path(dataset.path)
    if not path.is_file():
        reason = "it is a folder" if path.is_dir() else "there is no such file"
        yield draft.problem((*where, "path"), f"'{path}' is not allowed: {reason}")


def _reward(draft: Draft) -> Iterator[Problem]:
    """Whoever makes completions has a known rule that judges them."""
    config = draft.config
    users = {draft.algorithm.name: draft.algorithm.calls(config)}
    if config.evaluation is not None:
        users["evaluation"] = draft.algorithm.evaluation_calls(config)
    judging = [user for user, calls in users.items() if _makes_rewards(calls)]
    if judging and not draft.writes("reward"):
        message = f"is required: it judges the completions of {' and '.join(judging)}"
        yield draft.problem(("reward",), message)
    if config.reward is not None and not OWN_REWARD.fullmatch(config.reward.name):
        known = sorted(resolve(REWARDS))
        if config.reward.name not in known:
            message = f"'{config.reward.name}' is not allowed; {near(config.reward.name, known)}"
            yield draft.problem(("reward", "name"), message)


def _makes_rewards(calls: Sequence[Call]) -> bool:
    return any("rewards" in call.outputs for call in calls)


def _stop_when(draft: Draft) -> Iterator[Problem]:
    text = draft.config.stop_when
    if text is None or not StopWhen.parse(text).metric.startswith("eval/"):
        return
    evaluation = draft.config.evaluation
    if evaluation is None and not draft.writes("evaluation"):
        message = f"'{text}' is not allowed: it needs an evaluation section"
        yield draft.problem(("stop_when",), message)
    elif evaluation is not None and not (
        evaluation.every_steps or evaluation.every_seconds or evaluation.every_epochs
    ):
        message = f"'{text}' is not allowed: set evaluation.every_steps, or it is never looked at"
        yield draft.problem(("stop_when",), message)


def _graphs(draft: Draft) -> Iterator[Problem]:
    """The calls fit together; those of a new algorithm may not."""
    config, algorithm = draft.config, draft.algorithm
    if config.dataset.type in algorithm.dataset_types:
        yield from _graph(draft, algorithm.calls(config), config.dataset, "algorithm")
    evaluation = config.evaluation
    if evaluation is not None and evaluation.dataset.type in algorithm.evaluation_types:
        calls = algorithm.evaluation_calls(config)
        yield from _graph(draft, calls, evaluation.dataset, "evaluation")


def _graph(
    draft: Draft, calls: Sequence[Call], dataset: Dataset, section: str
) -> Iterator[Problem]:
    try:
        Graph(calls, DATASET_KEYS[dataset.type])
    except UsageError as error:
        for line in str(error).splitlines():
            yield draft.problem((section,), line)


def _hosts(draft: Draft) -> Iterator[Problem]:
    """Workers fill their hosts. (The local scheduler has one host and ignores the setting.)"""
    actor = draft.allocations().get("actor")
    per_host = draft.config.cluster.workers_per_host
    if actor is not None and per_host is not None and actor.world_size % per_host:
        message = (
            f"{per_host} is not allowed: must divide {actor.world_size}, the number of workers of "
            f"actor.backend '{actor}'"
        )
        yield draft.problem(("cluster", "workers_per_host"), message)


CHECKS: Final[tuple[Check, ...]] = (
    _backends,
    _same_ranks,
    _batches,
    _hosts,
    weights,
    tokenizer,
    _datasets,
    _reward,
    _stop_when,
    _graphs,
)
