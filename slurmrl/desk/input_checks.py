"""Checks of a trial's inputs by the inspector: weights, data, tokenizer, and the user's code."""

from __future__ import annotations

import resource
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Final

from slurmrl.algorithms.base import Interface
from slurmrl.algorithms.scalars import ScalarController
from slurmrl.config.schema import Config, EpisodeSettings, Reward, evaluation_key, role_key
from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.config.source import KeyPath, dotted
from slurmrl.data.records import MOST_PROBLEMS, listed
from slurmrl.data.rows import DatasetRows, Remarks
from slurmrl.data.tokenizer import load_tokenizer, vocabulary
from slurmrl.desk.content_checks import (
    beyond,
    changed_data,
    past_positions,
    score_first_row,
    unknown_metric,
    unrecorded_metric,
)
from slurmrl.desk.trial_checks import Finding, Weight
from slurmrl.errors import ConfigError, Problem, SlurmrlError, UnreadableInputError, UsageError
from slurmrl.models import model_tensors
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.shapes import VALUE_HEAD, file_form
from slurmrl.plan.algorithms import Algorithm, all_calls, uses_of
from slurmrl.plan.checks import Draft
from slurmrl.plan.checks.completion_checks import beyond_positions
from slurmrl.plan.dataflow import Call
from slurmrl.plan.estimates.shape import config_values, longest, shape_of
from slurmrl.plan.inherited_settings import OWN_WEIGHTS
from slurmrl.plan.own_algorithm import is_own
from slurmrl.plan.settings import Settings, load_resolved_settings
from slurmrl.registry import describe, import_own, resolve
from slurmrl.rewards.checked_reward import MODEL_SCORES
from slurmrl.rewards.weighted import WeightedReward, make_reward
from slurmrl.rollouts.episodes import make_episode, message_role
from slurmrl.rollouts.policy import Dialogue
from slurmrl.rollouts.tools import ToolSchemas, make_tools
from slurmrl.tensors.checkpoint.manifest import is_pinned
from slurmrl.tensors.layout import TensorSpec

MOST_BYTES: Final = 64 * 2**20
"""Number of bytes at the start of a data file that are checked."""
MOST_MEMORY: Final = 8 * 2**30


class InputChecks:
    """Checks the inputs of a configuration.

    ``compared``: paths of checkpoints whose adapters were compared with their base model earlier.
    """

    def __init__(self, settings: Settings, compared: Collection[str] = ()) -> None:
        self._compared = compared
        self.settings, self.config, self.algorithm = settings, settings.config, settings.algorithm
        self._metric = unknown_metric(self.config, self.algorithm)
        self.roles = uses_of(settings.config, settings.algorithm)
        self._new_tokens = beyond_positions(Draft(self.config, self.algorithm, settings.source))
        self.rows: dict[str, DatasetRows] = {}
        """Mapping from the dotted key of each valid dataset's section to its rows."""
        self.left_out: dict[str, int] = {}
        """Number of lines of each dataset that a length limit omits."""
        self._with_stats: list[bool] = []
        """Whether each reward that could be constructed has a method ``stats()``."""

    def checks(self) -> dict[str, tuple[str, Callable[[], Iterator[Finding]]]]:
        """Return a mapping from a subject to a description of its check and the check."""
        return {
            "algorithm": ("importing the algorithm", self._algorithm),
            "weights": ("reading the headers of the weights", self._weights),
            "data": ("reading the data", self._data),
            "changes": ("comparing data with the last commit", lambda: changed_data(self.config)),
            "reward": ("importing and making the reward", self._reward),
            "episode": ("importing and making the episode", self._episode),
            "tokenizer": ("reading the tokenizer", self._tokenizer),
            "lengths": ("tokenizing the data", self._lengths),
            "prompts": ("looking for mistakes in the data", self._remarks),
            "steps": ("counting the steps", self._steps),
            "adapters": ("comparing the models that adapters belong to", self._adapters),
        }

    def run(self, only: Collection[str] = ()) -> Iterator[dict[str, Any]]:
        """Yield ``{"begins": …}`` before each check, and its findings; ``only`` selects checks."""
        chosen = {name: check for name, check in self.checks().items() if not only or name in only}
        for subject, (what, check) in chosen.items():
            yield {"begins": what, "subject": subject}
            try:
                yield from (finding.to_json() for finding in check())
            except MemoryError:
                message = f"{what} took more than {MOST_MEMORY >> 30} GiB; not checked"
                yield Finding(subject, Weight.WARNING, message).to_json()
            except (SlurmrlError, OSError) as error:
                yield Finding(subject, Weight.FAILED, str(error)).to_json()
        yield {"begins": "", "subject": ""}

    def _algorithm(self) -> Iterator[Finding]:
        if is_own(name := self.algorithm.name):
            key, messages = "algorithm.name", wrong_code(self.config, self.algorithm)
            found = (Finding("algorithm", Weight.FAILED, message, key) for message in messages)
            yield from self._of_user_code("algorithm", key, name, found)

    def _of_user_code(
        self, subject: str, key: str, what: str, found: Iterator[Finding]
    ) -> Iterator[Finding]:
        """Yield the findings of a check that runs the user's code, and of its exception.

        A failed import is only a warning if it may succeed in the job's environment.
        """
        try:
            yield from found
        except UsageError as error:
            slurm = self.config.cluster.slurm
            elsewhere = isinstance(error, UnreadableInputError) and (slurm.container or slurm.setup)
            hint = " (the job's own container or setup may have it)" if elsewhere else ""
            weight = Weight.WARNING if elsewhere else Weight.FAILED
            yield Finding(subject, weight, f"{error}{hint}", key)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
            yield Finding(subject, Weight.FAILED, f"{what}: {describe(error)}", key)

    def _weights(self) -> Iterator[Finding]:
        seen, written = set(), [*self._writable()]
        known = {each.message for each in written}
        for use in self.roles:
            model = self.config.model(use.role)
            what = (model.path, use.head, use.trained, model.implementation)
            if model.path is None or what in seen:
                continue
            seen.add(what)
            key = dotted((*role_key(use.role), "path"))
            headers, wrong = model_tensors.read_headers(Path(model.path))
            extra: list[str] = []
            if model.implementation == "builtin" and not wrong:
                config = ModelConfig.from_hf(config_values(model))
                wrong = _wrong_weights(Path(model.path), headers, config, use.head)
                extra = model_tensors.unused(headers, config, use.head)
            elif not wrong:
                check, values = resolve("slurmrl.models.hf_loading:misfits"), config_values(model)
                wrong, extra = check(values, use.head, Path(model.path))
            if extra:
                message = f"{model.path}: {len(extra)} tensors are not used, such as {extra[0]}"
                yield Finding("weights", Weight.WARNING, message, key)
            if use.head == "value" and not (use.trained or wrong or VALUE_HEAD in headers):
                wrong = [
                    f"{model.path} has no {VALUE_HEAD}: every score would be 0; use an export of "
                    "algorithm.name: reward_model or another folder with a scalar head"
                ]
            yield from (Finding("weights", Weight.FAILED, e, key) for e in wrong if e not in known)
        yield from written
        yield from self._replayable()

    def _replayable(self) -> Iterator[Finding]:
        """Yield the reason why the actor, a model of transformers, cannot replay its experts."""
        if self.config.rollout.replay_experts and self.config.actor.implementation != "builtin":
            refusal = resolve("slurmrl.models.hf_routers:refusal")  # the import loads transformers
            if reason := refusal(HFConfig.from_hf(config_values(self.config.actor))):
                yield Finding("weights", Weight.FAILED, reason, "rollout.replay_experts")

    def _writable(self) -> Iterator[Finding]:
        """Yield the reasons why the weights of transformers models cannot be written to files."""
        for use in self.roles:
            model = self.config.model(use.role)
            if model.implementation == "builtin" or not (use.trained or use.role == "actor"):
                continue
            try:
                file_form(values := config_values(model), "hf", use.head)
                if use.trained:
                    resolve("slurmrl.models.hf_loading:require_trainable")(values, use.head)
            except UsageError as error:
                key = dotted((*role_key(use.role), "implementation"))
                yield Finding("weights", Weight.FAILED, str(error), key)

    def _adapters(self) -> Iterator[Finding]:
        """Compare the adapters of checkpoints with their base models.

        An export would compare them, but these checkpoints are evaluated without an export. This
        check is the last, because it reads whole models.
        """
        models = {use.role: self.config.model(use.role).path for use in self.roles}
        roles = {path: role for role, path in models.items() if path is not None}
        for path, role in roles.items():
            folder = Path(path)
            try:
                if is_pinned(folder) and path not in self._compared:
                    model_tensors.PinnedTensors(folder).check_base()
            except UsageError as error:
                key = dotted((*role_key(role), "path"))
                yield Finding("adapters", Weight.FAILED, str(error), key)

    def _data(self) -> Iterator[Finding]:
        for key, dataset in datasets(self.config):
            try:
                rows = self.rows[key] = DatasetRows(dataset, most_bytes=MOST_BYTES)
            except ConfigError as error:
                yield from (_of_data(key, problem) for problem in error.problems)
                continue
            except UsageError as error:
                yield Finding("data", Weight.FAILED, str(error), key)
                continue
            if not rows.records.whole:
                message = (
                    f"the file has more than {MOST_BYTES >> 20} MiB: its first {len(rows)} lines "
                    "were checked; the run checks the others when it starts"
                )
                yield Finding("data", Weight.WARNING, message, f"{key}.path")

    def _reward(self) -> Iterator[Finding]:
        for where, reward in self.config.rewards().items():
            key, what = dotted(where), f"reward '{reward.title}'"
            yield from self._of_user_code("reward", key, what, self._one_reward(key, reward))
        yield from unrecorded_metric(self._metric, self.config, self.algorithm, self._with_stats)

    def _one_reward(self, key: str, reward: Reward) -> Iterator[Finding]:
        with closing(make_reward(reward)) as function:
            function.check_rows([])
            self._with_stats.append(function.has_stats)
            if MODEL_SCORES in function.wanted() and not reward.uses_model:
                message = f"'{reward.title}' asks for {MODEL_SCORES}: add a part with name: model"
                yield Finding("reward", Weight.FAILED, message, key)
            sections = scored_datasets(self.config, key)
            yield from self._scored_rows(function, sections)
            prompts = (name for name, part in sources(sections) if part.kind == "prompt")
            if rows := next((self.rows[name] for name in prompts if name in self.rows), None):
                yield from score_first_row(reward, key, function, rows, self.settings)

    def _episode(self) -> Iterator[Finding]:
        settings = self.config.rollout.episode
        if settings.has_turns:
            what, found = f"episode '{settings.name}'", self._one_episode(settings)
            yield from self._of_user_code("episode", "rollout.episode", what, found)

    def _one_episode(self, settings: EpisodeSettings) -> Iterator[Finding]:
        with closing(make_tools(settings.tools)) as tools:
            make_episode(settings, tools)
        self._try_messages(settings)
        yield from ()

    def _try_messages(self, settings: EpisodeSettings) -> None:
        """Raise ChatTemplateError if the chat template has no place for an environment's messages.

        A user's own environment is not checked, because its messages may have any role.
        """
        environment, folder = settings.environment, self.config.actor.tokenizer
        chat = [dataset for _, dataset in datasets(self.config) if dataset.is_chat]
        if environment is None or ":" in environment.name or folder is None or not chat:
            return
        role = message_role(environment)
        tokenizer = load_tokenizer(Path(folder))
        for dataset in chat:
            Dialogue(dataset, tokenizer).require([role])

    def _scored_rows(
        self, function: WeightedReward, sections: Mapping[KeyPath, DatasetConfig]
    ) -> Iterator[Finding]:
        """Yield the rows that the reward cannot score."""
        for key, dataset in sources(sections):
            rows = self.rows.get(key)
            if dataset.kind != "prompt" or rows is None:
                continue
            if not rows.have_references and function.needs_answers:
                message = (
                    f"{dataset.path} has no answers under '{dataset.answer_key}' for the reward"
                )
                yield Finding("reward", Weight.FAILED, message, f"{key}.answer_key")
                continue
            checked = function.check_rows(rows.scored(range(len(rows))))
            messages = zip(rows.records.numbers, checked, strict=True)
            rejected = ((number, message) for number, message in messages if message)
            problems = [
                Problem(rows.records.where(number), dataset.answer_key, message)
                for number, message in islice(rejected, MOST_PROBLEMS)
            ]
            for problem in listed(problems):
                yield Finding("reward", Weight.FAILED, problem.message, problem.key, problem.where)

    def _tokenizer(self) -> Iterator[Finding]:
        folder = self.config.actor.tokenizer
        assert folder is not None, "checked before"
        known = vocabulary(Path(folder))
        if known is None:
            known = load_tokenizer(Path(folder)).get_vocab()
        yield from self._other_tokenizers(folder, known)
        last = max(known, key=lambda token: known[token])
        for use in self.roles:
            shape = shape_of(self.config.model(use.role))
            if shape is None or known[last] < shape.vocabulary:
                continue
            message = (
                f"'{folder}' does not fit the model: its largest token id is {known[last]} "
                f"({last!r}), and {use.role} embeds {shape.vocabulary} tokens (vocab_size)"
            )
            yield Finding("tokenizer", Weight.FAILED, message, "actor.tokenizer")
            return

    def _other_tokenizers(self, folder: str, known: Mapping[str, int]) -> Iterator[Finding]:
        """Yield a finding for each model whose tokenizer differs from the actor's tokenizer.

        Such a model would misread the actor's token ids.
        """
        for use in self.roles:
            path = self.config.model(use.role).path
            if use.role not in OWN_WEIGHTS or path is None:
                continue
            other = vocabulary(Path(path))
            differing = [token for token in known if other and other.get(token) != known[token]]
            if other and differing:
                token = differing[0]
                message = (
                    f"'{path}' was trained with another tokenizer than '{folder}': {token!r} is "
                    f"{other.get(token, 'no token')} there and {known[token]} here; {use.role} and "
                    "actor must share a tokenizer"
                )
                key = dotted((*role_key(use.role), "path"))
                yield Finding("tokenizer", Weight.FAILED, message, key)

    def _lengths(self) -> Iterator[Finding]:
        """Yield how many lines a limit omits, and how many lines are too long for a model."""
        for key, dataset in datasets(self.config):
            rows = self.rows.get(key)
            if rows is None or self.config.actor.tokenizer is None:
                continue
            limited, most = _is_limited(dataset), self._most_tokens(dataset)
            new = self._new_tokens.get(key.partition(".sources.")[0], 0)
            if not limited and not rows.may_be_longer(most and most - new):
                continue
            try:
                tokenizer = load_tokenizer(Path(self.config.actor.tokenizer))
                found = rows.count_long(tokenizer, most, limited=limited, new_tokens=new)
            except ConfigError as error:
                yield from (_of_data(key, problem) for problem in error.problems)
                continue
            if found.whole:
                self.left_out[key] = found.left_out
            if left := found.left_out:
                weight = Weight.WARNING if 2 * left > len(rows) else Weight.NOTE
                what = f"longer than {limits(dataset)} and are left out"
                yield Finding("data", weight, f"{_share(left, rows)} are {what}", key)
            if found.beyond:
                share = _share(found.beyond, rows)
                least = share if found.whole else f"at least {share}"
                yield beyond(least, key, dataset, most)
            elif new and most is not None and found.longest + new > most + 1:
                yield past_positions(found.longest, new, most + 1, key)

    def _remarks(self) -> Iterator[Finding]:
        folder = self.config.actor.tokenizer
        if folder is None:
            return
        load = cache(lambda: load_tokenizer(Path(folder)))
        episode = self.config.rollout.episode
        without_schema = ToolSchemas(episode).reason
        for key, dataset in datasets(self.config):
            if key not in self.rows:
                continue
            remarks = Remarks(dataset, self.rows[key].records.rows, load)
            with suppress(ConfigError):  # `_lengths` has already reported the error
                for remark in remarks.all(episode.tools, without_schema):
                    weight = Weight.WARNING if remark.warning else Weight.NOTE
                    yield Finding("data", weight, remark.message, f"{key}.{remark.key}")

    def _most_tokens(self, dataset: DatasetConfig) -> int | None:
        """Return the maximum number of tokens of a row for which all models have positions.

        A prompt also needs a position for its first new token. Return None if no model states a
        maximum. Return None if a setting limits the rows, because the plan checks this setting.
        """
        if longest(dataset, 0) is not None:
            return None
        shapes = [shape_of(self.config.model(use.role)) for use in self.roles]
        positions = [shape.positions for shape in shapes if shape and shape.positions]
        return min(positions) - (dataset.kind == "prompt") if positions else None

    def _steps(self) -> Iterator[Finding]:
        """Yield the number of steps of a single pass, if all of its rows were read."""
        rows = 0
        for key, dataset in datasets(self.config) if self.algorithm.one_pass else ():
            known = self.rows.get(key)
            if known is None or not known.records.whole:
                return
            if _is_limited(dataset) and key not in self.left_out:
                return
            rows += len(known) - self.left_out.get(key, 0)
        if rows:
            size = self.algorithm.batch_size
            message = f"one pass over {rows} rows, {size} in a step: {-(-rows // size)} steps"
            if self.config.total_steps is not None:
                message += f" (total_steps {self.config.total_steps} is a limit)"
            yield Finding("steps", Weight.NOTE, message, "algorithm.batch_size")


def _wrong_weights(
    folder: Path, headers: Mapping[str, TensorSpec], config: ModelConfig, head: Head
) -> list[str]:
    """Return the reasons why the built-in decoder cannot start from a folder's weights."""
    if misfits := model_tensors.mismatches(headers, config, head):
        return [f"{folder}: {misfit}" for misfit in misfits]
    tied = model_tensors.other_projection(folder, config, head)
    problem = f"{folder}: {tied}" if tied else model_tensors.small_not_finite(folder, config, head)
    return [problem] if problem else []


def _is_limited(dataset: DatasetConfig) -> bool:
    """Return whether the dataset may drop lines, depending on their tokens."""
    return bool(dataset.max_prompt_tokens or dataset.max_tokens or dataset.is_chat)


def datasets(config: Config) -> Iterator[tuple[str, DatasetConfig]]:
    """Yield the sources of all datasets with the dotted keys of their sections."""
    return sources(config.datasets())


def sources(sections: Mapping[KeyPath, DatasetConfig]) -> Iterator[tuple[str, DatasetConfig]]:
    for key, section in sections.items():
        for name, part in section.parts.items():
            yield dotted((*key, "sources", name) if name else key), part


def scored_datasets(config: Config, reward: str) -> Mapping[KeyPath, DatasetConfig]:
    """Return the datasets that the reward with this dotted key scores.

    The trial's reward scores all datasets, except for suites with a separate reward.
    """
    rewards: dict[KeyPath, str] = {("dataset",): "reward"}
    for suite in config.evaluations:
        key = evaluation_key(suite)
        own = (*key, "reward") in config.rewards()
        rewards[*key, "dataset"] = dotted((*key, "reward")) if own else "reward"
    return {key: part for key, part in config.datasets().items() if rewards[key] == reward}


def limits(dataset: DatasetConfig) -> str:
    """Return the length limits of a dataset in words, such as ``max_prompt_tokens 512``."""
    named = {"max_prompt_tokens": dataset.max_prompt_tokens, "max_tokens": dataset.max_tokens}
    return " or ".join(f"{name} {value}" for name, value in named.items() if value is not None)


def _share(lines: int, rows: DatasetRows) -> str:
    return f"{lines} of {len(rows)} lines ({lines / len(rows):.1%})"


def _of_data(section: str, problem: Any) -> Finding:
    """Return the finding for a problem of the data.

    A problem without a place is located in the configuration, any other problem in the data file.
    """
    if not problem.where:
        key = f"{section}.{problem.key}" if problem.key else section
        return Finding("data", Weight.FAILED, problem.message, key)
    return Finding("data", Weight.FAILED, problem.message, problem.key, problem.where)


def inputs(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the findings of the requested checks."""
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
    settings = load_resolved_settings(Path(request["config"]))
    yield from InputChecks(settings, request["compared"]).run(request["only"])


def wrong_code(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """Yield messages about interfaces and controllers that break their contract.

    Raises UsageError if an interface or a controller cannot be imported.
    """
    for call in dict.fromkeys(all_calls(config, algorithm)):
        yield from _of_call(call)
    controller = algorithm.controller()
    if not _is_class_of(import_own("controller", controller), ScalarController):
        yield f"the controller {controller} is not a subclass of {_named(ScalarController)}"


def _of_call(call: Call) -> Iterator[str]:
    what = f"the interface {call.interface} of call '{call.name}'"
    interface = import_own("interface", call.interface)
    if not _is_class_of(interface, Interface):
        yield f"{what} is not a subclass of {_named(Interface)}"
        return
    method = call.method.value
    if getattr(interface, method) is getattr(Interface, method):
        yield f"{what} does not define {method}()"
        return
    resolve(call.interface)()  # Ranks make the same call: let it fail before the job.


def _is_class_of(kind: object, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"
