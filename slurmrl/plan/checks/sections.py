"""Checks of datasets, rewards, roles, optimizers, steps, evaluations and graphs, and notes."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from slurmrl.config.schema import Config, Dataset, Reward, evaluation_key, role_key
from slurmrl.config.schema.base import OWN_CODE
from slurmrl.config.schema.config import FOLLOWERS, StopWhen
from slurmrl.config.schema.reward import ALONE
from slurmrl.config.schema.roles import USERS
from slurmrl.config.schema.rollout import VERIFIERS
from slurmrl.config.source import KeyPath, dotted, is_text
from slurmrl.errors import GraphError, Problem
from slurmrl.plan.algorithms import Algorithm, uses_of
from slurmrl.plan.checks import Draft
from slurmrl.plan.checks.completion_checks import no_rates
from slurmrl.plan.dataflow import DATASET_KEYS, Call, Graph
from slurmrl.plan.estimates.shape import shape_of
from slurmrl.plan.metric_names import RATES, evaluation_metric, known_metrics, makes_rewards
from slurmrl.registry import near, resolve

REWARDS: Final = "slurmrl.rewards:REWARDS"
NO_DATASET: Final = "slurmrl.data.source_files:no_dataset"
"""Table of rewards and check of dataset folders, both in rooms that ``plan`` must not import."""
OF_ENGINES: Final = ("cpu_offload", "transformer_engine", "fp8")
"""Settings of a model that some engines do not support."""


def folder_of_runs(draft: Draft) -> Iterator[Problem]:
    """Check that the run's copy of the code can be an entry of PYTHONPATH."""
    root = draft.config.root
    if os.pathsep in root:
        reason = (
            f": '{os.pathsep}' separates the entries of PYTHONPATH, so workers would not find the "
            "trial's copy of the code; choose another folder"
        )
        yield draft.reject(("root",), reason, root)
    if not is_text(root):
        reason = ": its name is not UTF-8, but files of the run contain it; choose another folder"
        yield draft.reject(("root",), reason, root)


def dataset_types(draft: Draft) -> Iterator[Problem]:
    algorithm = draft.algorithm
    for where, dataset in draft.config.datasets().items():
        trains = where == ("dataset",)
        types = algorithm.dataset_types if trains else algorithm.evaluation_types
        if dataset.kind not in types:
            task = "trains on" if trains else "evaluates on"
            reason = f": {algorithm.name} {task} {' or '.join(types)}"
            yield draft.reject((*where, "type"), reason, dataset.type)


def _sources(draft: Draft) -> Iterator[tuple[KeyPath, Dataset]]:
    """Yield the sources of all datasets, with the keys of their sections."""
    for where, dataset in draft.config.datasets().items():
        for name, part in dataset.parts.items():
            yield (*where, "sources", name) if name else where, part


def dataset_files(draft: Draft) -> Iterator[Problem]:
    for where, dataset in _sources(draft):
        if reason := _no_data(Path(dataset.path)):
            yield draft.reject((*where, "path"), f": {reason}", dataset.path)
        template = dataset.chat_template
        if isinstance(template, str) and not Path(template).is_file():
            reason = ": there is no such file; true selects the tokenizer's template"
            yield draft.reject((*where, "chat_template"), reason, template)


def _no_data(path: Path) -> str:
    if path.is_file():
        return ""
    if not path.is_dir():
        return _no_file(path)
    return str(resolve(NO_DATASET)(path))


def _no_file(path: Path) -> str:
    if path.exists():
        return "it is not a regular file"
    if path.is_symlink():
        return f"it is a broken link to {path.readlink()}"
    names: list[str] = []
    with suppress(OSError):  # The folder may be missing or unreadable.
        names = os.listdir(path.parent) if "*" not in path.name else []
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f"there is no such file or folder{f'; did you mean {close[0]}?' if close else ''}"


def dataset_chats(draft: Draft) -> Iterator[Problem]:
    """Check that datasets without a chat template have no settings that only a template uses."""
    for where, dataset in _sources(draft):
        if dataset.is_chat or dataset.chat_template is None:
            continue
        for name in ("system_prompt", "chat_template_options", "tools"):
            if getattr(dataset, name):
                reason = " without a chat template: set chat_template to true"
                yield draft.reject((*where, name), reason)


def conflicts(draft: Draft) -> Iterator[Problem]:
    """Check that the algorithm allows the combination of settings."""
    for where, message in draft.algorithm.conflicts(draft.config):
        yield draft.problem(where, message)


def reward(draft: Draft) -> Iterator[Problem]:
    """Check that a reward scores the completions, and that its name is known."""
    config = draft.config
    users = {draft.algorithm.name: (config, draft.algorithm.calls(config))}
    for suite, own in config.evaluations.items():
        user = dotted(evaluation_key(suite))
        users[user] = (own, draft.algorithm.evaluation_calls(own))
    scored = [
        user for user, (own, calls) in users.items() if makes_rewards(calls) and own.reward is None
    ]
    if scored and not draft.writes("reward") and not config.rollout.episode.has_turns:
        message = f"is required to score the completions of {' and '.join(scored)}"
        yield draft.problem(("reward",), message)
    for where, settings in config.rewards().items():
        yield from _unknown_functions(draft, where, settings)


def _unknown_functions(draft: Draft, where: KeyPath, settings: Reward) -> Iterator[Problem]:
    known = sorted(resolve(REWARDS))
    for name, part in settings.functions.items():
        if part.name not in known and not OWN_CODE.fullmatch(part.name):
            key = ("name",) if name == ALONE else ("parts", name, "name")
            reason = f"; {near(part.name, known)}, or your own FILE.py:name"
            yield draft.reject((*where, *key), reason, part.name)


def suite_rewards(draft: Draft) -> Iterator[Problem]:
    """Check that suites with a reward generate completions."""
    for suite, own in draft.config.evaluations.items():
        key = (*evaluation_key(suite), "reward")
        calls = draft.algorithm.evaluation_calls(own)
        if key in draft.config.rewards() and not makes_rewards(calls):
            reason = (
                f": the evaluation of a dataset of type {own.held_out.type} generates no "
                "completions to score"
            )
            yield draft.reject(key, reason)


def unused_tools(draft: Draft) -> Iterator[Problem]:
    """Check that no tools are set for an episode that has its own tools."""
    episode = draft.config.rollout.episode
    if episode.name == VERIFIERS and episode.tools:
        reason = f" with name: {VERIFIERS}, whose environments have their own tools; remove tools"
        yield draft.reject(("rollout", "episode", "tools"), reason)


def unused_roles(draft: Draft) -> Iterator[Problem]:
    """Check that each model with a section is used by a call."""
    used = {role for role, _ in draft.models()}
    for own in draft.config.evaluations.values():  # This includes evaluations in separate trials.
        used |= {call.role for call in draft.algorithm.evaluation_calls(own) if call.role}
    for role in FOLLOWERS:
        if role not in used and draft.source.values.get(role) is not None:
            reason = f": {draft.algorithm.why_unused(role)}; remove the section"
            yield draft.reject((role,), reason)


def engine_options(draft: Draft) -> Iterator[Problem]:
    """Check that the engines support the settings in `OF_ENGINES`."""
    for role, model in draft.models():
        for field in OF_ENGINES:
            reason, shape = draft.lacks(role, field), shape_of(model)
            if field == "transformer_engine" and shape is not None and shape.biased_experts:
                reason = reason or "TransformerEngine has no clamped experts; leave out the key"
            value = getattr(model, field)
            if reason and value and draft.writes(role, field):
                yield draft.reject((role, field), f": {reason}", value)


def averages(draft: Draft) -> Iterator[Problem]:
    """Check that a model with ``ema`` is frozen and has the actor's architecture."""
    actor = draft.config.actor
    for role, model in draft.models():
        if model.ema is None:
            continue
        reason = draft.lacks(role, "averages")
        if role in draft.trained:
            reason = f"{role} is trained; only a reference can follow the actor"
        elif (model.implementation, shape_of(model)) != (actor.implementation, shape_of(actor)):
            reason = reason or f"{role} and the actor are different architectures"
        if reason:
            yield draft.reject((role, "ema"), f": {reason}", model.ema)


def optimizers(draft: Draft) -> Iterator[Problem]:
    """Check that trained roles set only settings that their optimizer uses."""
    for role, model in draft.models():
        options = model.optimizer
        for field in options.unused if role in draft.trained else ():
            reason = f", because it does not use {field}; allowed: {', '.join(USERS[field])}"
            yield draft.reject((role, "optimizer", "name"), reason, options.name)


def untrained_steps(draft: Draft) -> Iterator[Problem]:
    """Check that the run trains each trained model in at least one step."""
    total = draft.config.total_steps
    for use in draft.algorithm.roles():
        steps = draft.algorithm.untrained_steps(use.role) if use.trained else 0
        if total and steps >= total:
            reason = f": the first {steps} steps do not train {use.role}"
            yield draft.reject(("total_steps",), reason, total)


def length_of_run(draft: Draft) -> Iterator[Problem]:
    """Check that the number of training steps is set, because learning rates depend on it.

    Algorithms with a single pass over the dataset must not have the settings of training.
    """
    config, name, one_pass = draft.config, draft.algorithm.name, draft.algorithm.one_pass
    if config.total_steps is None and (draft.trained or not one_pass):
        yield draft.problem(("total_steps",), f"is required: the number of steps of {name}")
    if not one_pass:
        return
    if config.dataset.weights:
        message = f"with weights are not allowed: {name} processes each row once"
        yield draft.problem(("dataset", "sources"), message)
    if config.evaluation is not None:
        reason = f": {name} trains no model that an evaluation could use"
        yield draft.reject(("evaluation",), reason)
    if config.stop_when is not None:
        yield draft.reject(("stop_when",), f": {name} ends after the last row of the dataset")


def something_to_do(draft: Draft) -> Iterator[Problem]:
    """Check that a trial without steps evaluates."""
    evaluation = draft.config.evaluation
    evaluates = evaluation is not None and evaluation.tasks is None and evaluation.at_start
    if draft.config.total_steps == 0 and not evaluates:
        reason = " without an evaluation at the start: the trial would do nothing"
        yield draft.reject(("total_steps",), reason, 0)


def stop_when(draft: Draft) -> Iterator[Problem]:
    text = draft.config.stop_when
    if text is None:
        return
    metric = StopWhen.parse(text).metric
    never = list(_never_evaluated(draft, metric)) if metric.startswith("eval/") else []
    known = known_metrics(draft.config, draft.algorithm)
    own = any(reward.has_own for reward in draft.config.rewards().values())
    if not never and metric not in known and not (own and not RATES.match(metric)):
        never = [f"no step records '{metric}'; {near(metric, known)}"]
    for reason in never:
        yield draft.reject(("stop_when",), f": {reason}", text)


def _never_evaluated(draft: Draft, metric: str) -> Iterator[str]:
    """Yield reasons why no evaluation reports a metric to the trainers in time."""
    evaluation = draft.config.evaluation
    if evaluation is None:
        if not draft.writes("evaluation"):
            yield "the metric needs an evaluation section"
    elif evaluation.tasks is not None:
        yield "results of evaluation.tasks arrive too late to end training"
    elif not (evaluation.every_steps or evaluation.every_seconds or evaluation.every_epochs):
        yield "no evaluation ever runs; set evaluation.every_steps"
    elif RATES.match(metric):
        for suite, own in evaluation.parts.items():
            rate = metric.removeprefix(evaluation_metric(suite))
            if rate.startswith(("pass@", "maj@")) and not own.rates:
                key = dotted((*evaluation_key(suite), "n" if own.n == 1 else "pass_score"))
                yield f"the metric needs {key}{' above 1' if own.n == 1 else ''}"


def graphs(draft: Draft) -> Iterator[Problem]:
    """Check that the calls of the algorithm form a graph. A new algorithm's calls may form none."""
    config, algorithm = draft.config, draft.algorithm
    if any(conflicts(draft)):
        return  # The check of conflicts has a clearer message.
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


def notes(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """Yield notes on learning rates, and on metrics and prompts of evaluations."""
    for place, dataset in config.datasets().items():
        if config.dataset.is_chat and not dataset.is_chat:
            yield (
                f"{dotted(place)}: its prompts get no chat template, but the training prompts get "
                f"one; set {dotted((*place, 'chat_template'))}: true to apply the template here too"
            )
    for suite, own in config.evaluations.items():
        evaluation = own.evaluation
        uncounted = evaluation is not None and evaluation.n > 1 and evaluation.pass_score is None
        if uncounted and makes_rewards(algorithm.evaluation_calls(own)):
            yield no_rates(own, dotted((*evaluation_key(suite), "pass_score")))
    yield from _unfinished_warmups(config, algorithm)
    yield from algorithm.notes(config)


def _unfinished_warmups(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """Yield notes on warm-ups that are longer than the run or than the schedule."""
    for role in (use.role for use in uses_of(config, algorithm) if use.trained):
        options, key = config.model(role).optimizer, dotted((*role_key(role), "optimizer"))
        trained = (config.total_steps or 0) - algorithm.untrained_steps(role)
        steps, warmup = trained * algorithm.optimizer_steps, options.warmup_steps
        if warmup > steps > 0:
            reason = f"the {steps} optimizer steps of the run: the learning rate never reaches lr"
            yield f"{key}.warmup_steps {warmup} is more than {reason}"
        elif options.schedule != "constant" and 0 < (options.schedule_steps or 0) <= warmup:
            reason = "is not above the warm-up, after which the learning rate falls to its minimum"
            yield f"{key}.schedule_steps {options.schedule_steps} {reason} (warmup_steps {warmup})"
