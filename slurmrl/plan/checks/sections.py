"""Checks of the configuration's sections: datasets, reward, optimizers, stop_when, graph."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.conditions import StopWhen
from slurmrl.config.schema import WHOLE, Config, Dataset, Model, Reward, evaluation_key
from slurmrl.config.schema.config import FOLLOWERS
from slurmrl.config.schema.model import USERS
from slurmrl.config.schema.reward import ALONE, OWN_REWARD
from slurmrl.config.source import KeyPath, dotted
from slurmrl.errors import GraphError, Problem
from slurmrl.plan.algorithms import Algorithm
from slurmrl.plan.checks.draft import Draft
from slurmrl.plan.dataflow import DATASET_KEYS, Call, Graph, Method
from slurmrl.plan.engine_rules import ENGINES
from slurmrl.plan.estimates.memory import SHARDED
from slurmrl.plan.estimates.shape import shape_of
from slurmrl.plan.metrics import (
    EVALUATION_S,
    ROLLOUT_METRICS,
    STEP_METRICS,
    UPDATE_KEPT,
    evaluation_metric,
)
from slurmrl.plan.model_files import config_values
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.plan.precision import rounds_to
from slurmrl.registry import near, resolve

MOST_SUPPORT: Final = 1024
"""Token ids of a recorded support: 4 KiB for each token of a completion."""
RATES: Final = re.compile(r"eval/([^/]+/)?(pass|maj)@")
"""What evaluations of several completions report."""

REWARDS: Final = "slurmrl.rewards:REWARDS"
NO_DATASET: Final = "slurmrl.data.sources.base:no_dataset"
"""The table of rewards, and what says why a folder is no dataset. They are in layers above the
plan, so they are resolved by name."""


def _datasets(draft: Draft) -> Iterator[tuple[KeyPath, Dataset, Sequence[str]]]:
    """The datasets of a trial with their keys and the types that they may have."""
    config, algorithm = draft.config, draft.algorithm
    for where, dataset in config.datasets().items():
        types = algorithm.dataset_types if where == ("dataset",) else algorithm.evaluation_types
        yield where, dataset, types


def folder_of_runs(draft: Draft) -> Iterator[Problem]:
    """Check that the run's copy of the code can be an entry of PYTHONPATH."""
    root = draft.config.root
    if os.pathsep in root:
        message = (
            f"'{root}' is not allowed: '{os.pathsep}' separates the entries of PYTHONPATH, so "
            "workers would not find the trial's copy of the code; choose another folder"
        )
        yield draft.problem(("root",), message)


def _sources(draft: Draft) -> Iterator[tuple[KeyPath, Dataset]]:
    """The sources of all datasets with their keys."""
    for where, dataset, _ in _datasets(draft):
        for name, part in dataset.parts.items():
            yield (*where, "sources", name) if name else where, part


def dataset_types(draft: Draft) -> Iterator[Problem]:
    for where, dataset, types in _datasets(draft):
        if dataset.kind not in types:
            task = "trains on" if where == ("dataset",) else "evaluates on"
            rule = f"{draft.algorithm.name} {task} {' or '.join(types)}"
            yield draft.problem((*where, "type"), f"'{dataset.type}' is not allowed: {rule}")


def publication(draft: Draft) -> Iterator[Problem]:
    """Weight versions are those of an actor that is trained."""
    trained = {use.role for use in draft.algorithm.roles() if use.trained}
    published = draft.config.rollout.publish is not None and draft.config.rollout.tasks is None
    if published and "actor" not in trained:
        message = f"is not allowed: {draft.algorithm.name} trains no actor whose weights change"
        yield draft.problem(("rollout", "publish"), message)


def conflicts(draft: Draft) -> Iterator[Problem]:
    """Settings that exclude each other with the algorithm."""
    for where, message in draft.algorithm.conflicts(draft.config):
        yield draft.problem(where, message)


def dataset_files(draft: Draft) -> Iterator[Problem]:
    for where, dataset in _sources(draft):
        if reason := _no_data(Path(dataset.path)):
            yield draft.problem((*where, "path"), f"'{dataset.path}' is not allowed: {reason}")
        template = dataset.chat_template
        if isinstance(template, str) and not Path(template).is_file():
            message = f"'{template}' is not allowed: there is no such file (true: the tokenizer's)"
            yield draft.problem((*where, "chat_template"), message)


def _no_data(path: Path) -> str:
    if path.is_file():
        return ""
    if not path.is_dir():
        return "there is no such file or folder"
    return str(resolve(NO_DATASET)(path))


def dataset_chats(draft: Draft) -> Iterator[Problem]:
    """Settings that only a chat template uses."""
    for where, dataset in _sources(draft):
        for name in ("system_prompt", "chat_template_options", "tools"):
            undecided = dataset.chat_template is None
            if getattr(dataset, name) and not dataset.is_chat and not undecided:
                message = "is not allowed without a chat template: set chat_template to true"
                yield draft.problem((*where, name), message)


def reward(draft: Draft) -> Iterator[Problem]:
    """Completions need a reward that judges them, and its name must be known."""
    config = draft.config
    users = {draft.algorithm.name: (config, draft.algorithm.calls(config))}
    for suite, own in config.evaluations.items():
        user = dotted(evaluation_key(suite))
        users[user] = (own, draft.algorithm.evaluation_calls(own))
    judging = [
        user for user, (own, calls) in users.items() if _makes_rewards(calls) and own.reward is None
    ]
    if judging and not draft.writes("reward") and not config.rollout.episode.has_turns:
        message = f"is required: it judges the completions of {' and '.join(judging)}"
        yield draft.problem(("reward",), message)
    for where, judge in config.rewards().items():
        yield from _unknown_functions(draft, where, judge)


def _unknown_functions(draft: Draft, where: KeyPath, judge: Reward) -> Iterator[Problem]:
    known = sorted(resolve(REWARDS))
    for name, part in judge.functions.items():
        if part.name not in known and not OWN_REWARD.fullmatch(part.name):
            key = ("name",) if name == ALONE else ("parts", name, "name")
            own = "or module:name of your own"
            message = f"'{part.name}' is not allowed; {near(part.name, known)}, {own}"
            yield draft.problem((*where, *key), message)


def suite_rewards(draft: Draft) -> Iterator[Problem]:
    """A reward of a suite judges completions."""
    for suite, own in draft.config.evaluations.items():
        key = (*evaluation_key(suite), "reward")
        if key not in draft.config.rewards():
            continue
        if not _makes_rewards(draft.algorithm.evaluation_calls(own)):
            message = f"is not allowed: the evaluation of a dataset of type {own.held_out.type} "
            yield draft.problem(key, f"{message}generates nothing that it could judge")


def unused_roles(draft: Draft) -> Iterator[Problem]:
    """Sections of models that no call uses: nothing would execute their settings."""
    used = {role for role, _ in draft.models()}
    for own in draft.config.evaluations.values():  # also of trials of their own
        used |= {call.role for call in draft.algorithm.evaluation_calls(own) if call.role}
    for role in FOLLOWERS:
        if role not in used and draft.source.values.get(role) is not None:
            reason = draft.algorithm.why_unused(role)
            yield draft.problem((role,), f"is not allowed: {reason}; remove the section")


def completions(draft: Draft) -> Iterator[Problem]:
    """Only a trial or an evaluation that generates has several completions of each prompt."""
    config = draft.config
    if config.rollout.n > 1 and not _generates(draft.algorithm.calls(config)):
        message = f"{config.rollout.n} is not allowed: {draft.algorithm.name} does not generate"
        yield draft.problem(("rollout", "n"), f"{message} in training (see evaluation.n)")
    for suite, own in config.evaluations.items():
        n = own.evaluation.n if own.evaluation is not None else 1
        if n > 1 and not _generates(draft.algorithm.evaluation_calls(own)):
            message = f"{n} is not allowed: this evaluation does not generate"
            yield draft.problem((*evaluation_key(suite), "n"), message)


def _generates(calls: Sequence[Call]) -> bool:
    return any(call.method is Method.GENERATE for call in calls)


def _makes_rewards(calls: Sequence[Call]) -> bool:
    return any("rewards" in call.outputs for call in calls)


def sampling(draft: Draft) -> Iterator[Problem]:
    """What would draw training completions from another distribution than the losses assume."""
    if not draft.algorithm.trains_on_samples:
        return
    rollout = draft.config.rollout
    recorded = draft.algorithm.replays
    restricted = {
        "top_k": rollout.top_k is not None and not recorded,
        "top_p": rollout.top_p < 1.0 and not recorded,
        "greedy": rollout.greedy,
        "min_new_tokens": rollout.min_new_tokens > 0,
    }
    if recorded:
        yield from _unrecorded(draft)
    for field in (field for field, restricts in restricted.items() if restricts):
        value = str(getattr(rollout, field)).lower()
        message = (
            f"{value} is not allowed with {draft.algorithm.name}: its losses assume that each "
            "token is drawn from the whole vocabulary, and would be wrong for others; leave it out"
        )
        yield draft.problem(("rollout", field), message)


def _unrecorded(draft: Draft) -> Iterator[Problem]:
    """Restrictions of sampling that cannot be recorded for each token."""
    rollout = draft.config.rollout
    if rollout.top_k is None and rollout.top_p < 1.0:
        message = (
            f"{rollout.top_p:g} is not allowed without rollout.top_k, which bounds the tokens that "
            f"are recorded for each one that is drawn; set it, to {MOST_SUPPORT} or less"
        )
        yield draft.problem(("rollout", "top_p"), message)
    if rollout.top_k is None:
        return
    if rollout.top_k > MOST_SUPPORT:
        message = (
            f"{rollout.top_k} is not allowed with {draft.algorithm.name}: so many token ids are "
            f"recorded for each token that it draws; at most {MOST_SUPPORT}"
        )
        yield draft.problem(("rollout", "top_k"), message)
    allocation = draft.allocations().get(ROLLOUTS)
    if allocation is None or allocation.backend not in ENGINES:
        return
    if not ENGINES[allocation.backend].records_support:
        able = ", ".join(
            name for name, rules in ENGINES.items() if rules.generates and rules.records_support
        )
        message = (
            f"{rollout.top_k} is not allowed with {allocation.backend} and {draft.algorithm.name}: "
            "it does not report the tokens that each one is drawn from, which the losses need; "
            f"allowed backends: {able}"
        )
        yield draft.problem(("rollout", "top_k"), message)


def experts(draft: Draft) -> Iterator[Problem]:
    """Only some engines record the experts of models that have some."""
    if not draft.config.rollout.replay_experts:
        return
    actor, allocations = draft.config.actor, draft.allocations()
    draws = allocations.get(ROLLOUTS, allocations.get("actor"))
    shape, reason = shape_of(actor), ""
    if not (draft.algorithm.trains_on_samples and draft.algorithm.replays):
        reason = f"{draft.algorithm.name} does not replay what generation records"
    elif shape is not None and not shape.experts:
        reason = "the actor has no experts"
    elif actor.implementation == "hf":
        reason = "only the built-in decoder replays experts, not implementation: hf"
    elif shape is not None and draws and draws.backend in ENGINES:
        reason = _unrecorded_experts(actor, draws.backend)
    if reason:
        yield draft.problem(("rollout", "replay_experts"), f"true is not allowed: {reason}")


def _unrecorded_experts(actor: Model, backend: str) -> str:
    """Why an engine cannot record the experts of the actor; empty if it can."""
    kind = config_values(actor).get("model_type")
    if ENGINES[backend].records_experts_of(kind):
        return ""
    able = " or ".join(
        name
        for name, rules in ENGINES.items()
        if rules.records_experts_of(kind) and not BACKENDS[name].trains
    )
    return f"{backend} does not record the experts of {kind}; rollout.backend may be {able}"


def untrained_steps(draft: Draft) -> Iterator[Problem]:
    """Each trained model has steps in which it is trained."""
    total = draft.config.total_steps
    for use in draft.algorithm.roles():
        steps = draft.algorithm.untrained_steps(use.role) if use.trained else 0
        if total and steps >= total:
            message = f"{total} is not allowed: the first {steps} steps do not train {use.role}"
            yield draft.problem(("total_steps",), message)


def length_of_run(draft: Draft) -> Iterator[Problem]:
    """Training has a number of steps, on which learning rates depend; a single pass ends with its
    dataset."""
    config, name = draft.config, draft.algorithm.name
    trains = any(use.trained for use in draft.algorithm.roles())
    if config.total_steps is None and (trains or not draft.algorithm.one_pass):
        message = f"is required: the steps after which {name} is finished"
        yield draft.problem(("total_steps",), message)
    if not draft.algorithm.one_pass:
        return
    if config.dataset.weights:
        message = f"with weights are not allowed: {name} goes over each row once"
        yield draft.problem(("dataset", "sources"), message)
    if config.evaluation is not None:
        message = f"is not allowed: {name} trains nothing that could be evaluated on the way"
        yield draft.problem(("evaluation",), message)
    if config.stop_when is not None:
        message = f"is not allowed: {name} ends after the last row of the dataset"
        yield draft.problem(("stop_when",), message)


def something_to_do(draft: Draft) -> Iterator[Problem]:
    """A trial without steps evaluates."""
    evaluation = draft.config.evaluation
    evaluates = evaluation is not None and evaluation.tasks is None and evaluation.at_start
    if draft.config.total_steps == 0 and not evaluates:
        message = "0 is not allowed without an evaluation at the start: the trial would do nothing"
        yield draft.problem(("total_steps",), message)


def engine_options(draft: Draft) -> Iterator[Problem]:
    """Settings that not every engine supports."""
    for role, model in draft.models():
        allocation = draft.allocations().get(role)
        rules = ENGINES.get(allocation.backend) if allocation else None
        if rules is None or allocation is None:
            continue
        for field in ("cpu_offload", "transformer_engine"):
            inherited = not draft.writes(role, field)
            if getattr(model, field) and not getattr(rules, field) and not inherited:
                able = ", ".join(name for name, other in ENGINES.items() if getattr(other, field))
                message = f"true is not allowed with {allocation.backend}; allowed backends: {able}"
                yield draft.problem((role, field), message)


def averages(draft: Draft) -> Iterator[Problem]:
    """Only a frozen model on an engine with float32 shards can follow the actor's weights."""
    actor = draft.config.actor
    trained = {use.role for use in draft.algorithm.roles() if use.trained}
    for role, model in draft.models():
        if model.ema is None:
            continue
        allocation = draft.allocations().get(role)
        problem = None
        if role in trained:
            problem = f"{role} is trained; only a reference can follow the actor"
        elif allocation is not None and allocation.backend not in SHARDED:
            able = ", ".join(sorted(SHARDED))
            problem = f"{allocation.backend} has no float32 weights of a frozen model; use {able}"
        elif model.implementation != actor.implementation or shape_of(model) != shape_of(actor):
            problem = f"{role} and the actor are different architectures"
        if problem is not None:
            yield draft.problem((role, "ema"), f"{model.ema} is not allowed: {problem}")


def optimizers(draft: Draft) -> Iterator[Problem]:
    """Settings that the chosen optimizer does not use."""
    trained = {use.role for use in draft.algorithm.roles() if use.trained}
    for role, model in draft.models():
        if role not in trained:
            continue
        options = model.optimizer
        for field in options.unused:
            able = ", ".join(USERS[field])
            message = (
                f"'{options.name}' is not allowed with {field}, which it does not use; "
                f"allowed: {able}"
            )
            yield draft.problem((role, "optimizer", "name"), message)


def stop_when(draft: Draft) -> Iterator[Problem]:
    text = draft.config.stop_when
    if text is None:
        return
    metric = StopWhen.parse(text).metric
    never = list(_stops_by_evaluation(draft, text)) if metric.startswith("eval/") else []
    yield from never
    rewards = draft.config.rewards().values()
    known = known_metrics(draft.config, draft.algorithm)
    own = any(reward.has_own for reward in rewards) and not RATES.match(metric)
    if metric not in known and not own and not never:
        message = f"'{text}' is not allowed: no step records '{metric}'; {near(metric, known)}"
        yield draft.problem(("stop_when",), message)


def known_metrics(config: Config, algorithm: Algorithm) -> list[str]:
    """The metrics that lines of ``metrics.jsonl`` can have; a user's own reward may add more."""
    calls = algorithm.calls(config)
    parts = _part_metrics(config)
    names = {"step", "epoch", *STEP_METRICS, "rows_left_out", "time/total", "time/checkpoint_stall"}
    names |= {f"time/{call.name}" for call in calls} | {"time/step"}
    names |= {name for call in calls for name in call.metrics}
    names |= parts if _makes_rewards(calls) else set()
    names |= set(ROLLOUT_METRICS) if config.rollout.tasks is not None else set()
    names |= {UPDATE_KEPT} if rounds_to(config) and _generates(calls) else set()
    for suite, own in config.evaluations.items():
        evaluation_calls = algorithm.evaluation_calls(own)
        judged = {name for call in evaluation_calls for name in call.metrics}
        judged |= _part_metrics(own) if _makes_rewards(evaluation_calls) else set()
        measures = algorithm.evaluation_measures(own)
        judged |= {f"{name}{end}" for name in measures for end in ("", "/low", "/high")}
        prefix = evaluation_metric(suite)
        names |= {f"{prefix}{name}" for name in judged | set(STEP_METRICS)} | {EVALUATION_S}
        names |= set() if suite == WHOLE else {f"{EVALUATION_S}/{suite}"}
    return sorted(names)


def _part_metrics(config: Config) -> set[str]:
    return {f"reward/{name}" for name in config.reward.parts} if config.reward else set()


def _stops_by_evaluation(draft: Draft, text: str) -> Iterator[Problem]:
    evaluation = draft.config.evaluation
    if evaluation is None and not draft.writes("evaluation"):
        message = f"'{text}' is not allowed: it needs an evaluation section"
        yield draft.problem(("stop_when",), message)
    elif evaluation is not None and evaluation.tasks is not None:
        message = f"'{text}' is not allowed: evaluations of evaluation.tasks come too late for it"
        yield draft.problem(("stop_when",), message)
    elif evaluation is not None and not (
        evaluation.every_steps or evaluation.every_seconds or evaluation.every_epochs
    ):
        message = f"'{text}' is not allowed: no evaluation ever runs; set evaluation.every_steps"
        yield draft.problem(("stop_when",), message)
    elif evaluation is not None and RATES.match(text.lstrip()):
        for suite, own in evaluation.parts.items():
            rate = text.lstrip().removeprefix(evaluation_metric(suite))
            if rate.startswith(("pass@", "maj@")) and not own.rates:
                key = dotted((*evaluation_key(suite), "n" if own.n == 1 else "pass_score"))
                missing = f"{key} above 1" if own.n == 1 else key
                yield draft.problem(("stop_when",), f"'{text}' is not allowed: it needs {missing}")


def graphs(draft: Draft) -> Iterator[Problem]:
    """The calls fit together. (A new algorithm's may not.) Where settings exclude each other, those
    are the reason."""
    config, algorithm = draft.config, draft.algorithm
    if any(conflicts(draft)):
        return
    if config.dataset.kind in algorithm.dataset_types:
        yield from _graph(draft, algorithm.calls(config), config.dataset, ("algorithm",))
    for suite, own in config.evaluations.items():
        if own.held_out.kind in algorithm.evaluation_types:
            calls = algorithm.evaluation_calls(own)
            yield from _graph(draft, calls, own.held_out, evaluation_key(suite))


def _graph(
    draft: Draft, calls: Sequence[Call], dataset: Dataset, section: KeyPath
) -> Iterator[Problem]:
    try:
        Graph(calls, DATASET_KEYS[dataset.kind])
    except GraphError as error:
        for problem in error.args:
            yield draft.problem(section, problem)
