"""Evaluations: on one held-out set or on several, by the trainers or in trials of their own."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field, model_validator

from slurmrl.config.schema.base import (
    Line,
    PositiveFloat,
    PositiveInt,
    Section,
    Word,
)
from slurmrl.config.schema.cluster import JobOptions
from slurmrl.config.schema.data import Dataset
from slurmrl.config.schema.reward import PART_NAME, Reward
from slurmrl.config.schema.rollout import SAME_COMPLETIONS, subset_sizes


def _check_pattern(text: str) -> str:
    try:
        groups = re.compile(text).groups
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    if groups > 1:
        raise ValueError(f"has {groups} groups, must have at most one; write (?:…) for the others")
    return text


def _check_suite_name(name: str) -> str:
    if not PART_NAME.fullmatch(name):
        raise ValueError(
            "a suite has a name of 1 to 64 letters, digits, '.', '_' or '-' that starts with a "
            "letter or a digit"
        )
    return name


Pattern = Annotated[Word, AfterValidator(_check_pattern)]
SuiteName = Annotated[str, AfterValidator(_check_suite_name)]
OF_TRAINERS: Final = (
    "every_steps",
    "every_seconds",
    "every_epochs",
    "at_start",
    "at_end",
    "keep_last",
)
"""Settings of evaluations that the trainers make."""
WHOLE: Final = ""
"""Name of the only part of an evaluation without suites."""


class Suite(Section):
    """One of several held-out sets. What it leaves at null is as in `evaluation`."""

    dataset: Dataset
    """The held-out prompts."""
    reward: Reward | None = None
    """The reward that judges their completions. Default: the trial's."""
    samples: PositiveInt | None = None
    """Number of prompts, from the start of the dataset."""
    n: PositiveInt | None = None
    """Completions of each prompt."""
    pass_score: float | None = None
    """Reward from which on a completion counts as correct. Default: `evaluation.pass_score`, or 1
    where every reward of the suite is 1 or 0."""
    vote_pattern: Pattern | None = None
    """Regular expression of the answer that a completion votes for in maj@k."""
    temperature: PositiveFloat | None = None
    """Divides the logits before sampling."""
    greedy: bool | None = None
    """Always take the most probable token."""
    max_new_tokens: PositiveInt | None = None
    """Maximum number of tokens in a completion."""


class EvaluationTasks(Section):
    """Evaluation of each checkpoint in a separate trial; training may continue.

    See docs/howto/evaluation.md.
    """

    backend: Line = ""
    """Layout of the model there, for example `fsdp:d1`, in which its engine also generates.
    Default: that of the actor, and `rollout.backend` generates as in training."""
    slurm: JobOptions = JobOptions()


class Evaluation(Section):
    """Evaluation on held-out prompts, with a separate random stream.

    It uses the run's reward or the rewards of `suites`.
    """

    tasks: EvaluationTasks | None = None
    """Evaluate each checkpoint in a trial of its own, `{}` or with settings, instead of on the
    trainers. Default: the trainers evaluate."""
    dataset: Dataset | None = None
    """The held-out prompts. Required without `suites`."""
    suites: dict[SuiteName, Suite] = Field(default_factory=dict)
    """Several held-out sets in place of `dataset`, by names of your choice. Each evaluation goes
    through all of them; the metrics of one are `eval/<suite>/…` (docs/howto/evaluation.md)."""
    samples: PositiveInt | None = 512
    """Number of prompts, from the start of the dataset; null uses all."""
    n: PositiveInt = 1
    """Completions of each prompt; metrics are means over all of them. With several,
    `eval/pass@<k>` and `eval/maj@<k>` are reported too (docs/algorithms/evaluate.md)."""
    pass_score: float | None = None
    """Reward from which on a completion counts as correct, for pass@k and maj@k. Default: 1 where
    every reward is 1 or 0 (`exact_match`, `math`, `code` with `score: all`); with other rewards,
    evaluations have no pass@k and maj@k."""
    vote_pattern: Pattern | None = None
    """Regular expression of the answer that a completion votes for in maj@k: its last match, or the
    group in it, as in `#### (.*)`. A completion without a match has no vote. Default: the whole
    completion."""
    every_steps: PositiveInt | None = None
    """Steps between evaluations."""
    every_seconds: PositiveFloat | None = None
    """Seconds between evaluations. The run evaluates at the end of a step."""
    every_epochs: PositiveInt | None = None
    """Epochs of the training dataset between evaluations."""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    keep_last: PositiveInt | None = None
    """Number of newest evaluations whose files are kept in `evaluations/`, with the scores of each
    item (docs/algorithms/evaluate.md). Older ones are removed at a commit. Default: all."""
    temperature: PositiveFloat = 1.0
    """Divides the logits before sampling."""
    greedy: bool = False
    """Always take the most probable token."""
    max_new_tokens: PositiveInt | None = None
    """Maximum number of tokens in a completion. Default: the value in `rollout`."""

    @property
    def attempts(self) -> tuple[int, ...]:
        """Each k of pass@k, and of maj@k without 1.

        Empty for a single completion, or if no reward says which completions are correct.
        """
        return subset_sizes(self.n) if self.n > 1 and self.pass_score is not None else ()

    @property
    def rates(self) -> tuple[str, ...]:
        """The metrics of several completions, which have confidence intervals."""
        agreed = (f"maj@{k}" for k in self.attempts[1:])
        return (*(f"pass@{k}" for k in self.attempts), *agreed)

    @property
    def parts(self) -> dict[str, Evaluation]:
        """An evaluation of a single dataset for each suite, by its name; `WHOLE` without suites."""
        if not self.suites:
            return {WHOLE: self}
        return {name: self._of(suite) for name, suite in self.suites.items()}

    def _of(self, suite: Suite) -> Evaluation:
        own: dict[str, Any] = {
            name: value
            for name in Suite.model_fields
            if name != "reward" and (value := getattr(suite, name)) is not None
        }
        return self.model_copy(update={**own, "suites": {}})

    @model_validator(mode="after")
    def _one_form(self) -> Evaluation:
        if self.dataset is None and not self.suites:
            raise ValueError("needs a dataset, or suites")
        if self.dataset is not None and self.suites:
            raise ValueError("has both dataset and suites; a dataset belongs to each suite")
        return self

    @model_validator(mode="after")
    def _one_trigger(self) -> Evaluation:
        for name in OF_TRAINERS if self.tasks is not None else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is not allowed with tasks, which evaluate each checkpoint; see "
                    "checkpoint.every_steps"
                )
        return self

    @model_validator(mode="after")
    def _completions_differ(self) -> Evaluation:
        for name, own in self.parts.items():
            if own.greedy and own.n > 1:
                where = f"suite '{name}': " if name else ""
                message = f"n {own.n} is not allowed with greedy: {SAME_COMPLETIONS}"
                raise ValueError(where + message)
        return self
