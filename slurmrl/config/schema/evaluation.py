"""Evaluations on one or several held-out sets, by the trainers or in separate trials."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Final

from pydantic import AfterValidator, Field, model_validator

from slurmrl.config.schema.base import (
    Line,
    PositiveFloat,
    PositiveInt,
    Section,
    Unit,
    Word,
    name_of,
)
from slurmrl.config.schema.cluster import JobOptions
from slurmrl.config.schema.data import Dataset
from slurmrl.config.schema.reward import Reward
from slurmrl.config.schema.rollout import SAME_COMPLETIONS, subset_sizes


def _check_pattern(text: str) -> str:
    try:
        groups = re.compile(text).groups
    except re.error as error:
        raise ValueError(f"must be a regular expression: {error}") from error
    if groups > 1:
        raise ValueError(f"has {groups} groups; must have at most one: write (?:…) for the others")
    return text


Pattern = Annotated[Word, AfterValidator(_check_pattern)]
SuiteName = Annotated[str, name_of("a suite")]
OF_TRAINERS: Final = (
    "every_steps",
    "every_seconds",
    "every_epochs",
    "at_start",
    "at_end",
    "keep_last",
)
"""Settings that apply only to evaluations by the trainers."""
WHOLE: Final = ""
"""Name of the suite of an evaluation without suites."""


class Suite(Section):
    """One of several held-out sets.

    A key that is null takes its value from `evaluation`.
    """

    null_means: ClassVar[str] = "the value in `evaluation`"

    dataset: Dataset
    """The held-out prompts."""
    reward: Reward | None = None
    """The reward that scores the suite's completions. Default: the trial's reward."""
    samples: Annotated[PositiveInt, Unit("prompts")] | None = None
    """Number of prompts, from the start of the dataset. Example: `256`"""
    n: PositiveInt | None = None
    """Completions of each prompt. Example: `8`"""
    pass_score: float | None = None
    """Minimum reward of a correct completion. Default: `evaluation.pass_score`, or 1 if every
    reward of the suite is 1 or 0. Example: `1.0`"""
    vote_pattern: Pattern | None = None
    """Regular expression that finds a completion's answer, the vote in maj@k. Example: `'####
    (.*)'`"""
    temperature: PositiveFloat | None = None
    """Divisor of the logits in sampling. Example: `0.7`"""
    greedy: bool | None = None
    """Always take the most probable token."""
    max_new_tokens: PositiveInt | None = None
    """Maximum number of tokens in a completion. Example: `1024`"""


class EvaluationTasks(Section):
    """Evaluation of each checkpoint in a separate trial.

    Training may continue during the evaluation (docs/howto/evaluation.md).
    """

    backend: Line = ""
    """Layout of the model in the evaluation trial; this engine also generates. Default: the
    actor's layout, and `rollout.backend` generates as in training. Example: `fsdp:d1`"""
    slurm: JobOptions = JobOptions()


class Evaluation(Section):
    """Evaluation on held-out prompts, with a separate random stream.

    The evaluation uses the run's reward or the rewards of `suites`. Example: `{dataset: {type:
    prompt, path: test.jsonl}, every_steps: 20}`
    """

    tasks: EvaluationTasks | None = None
    """Evaluate each checkpoint in a separate trial instead of on the trainers. `{}` uses all
    defaults. Default: the trainers evaluate."""
    dataset: Dataset | None = None
    """The held-out prompts. Required without `suites`."""
    suites: dict[SuiteName, Suite] = Field(default_factory=dict)
    """Several held-out sets in place of `dataset`, by names of your choice. Each evaluation uses
    all suites; the metrics of a suite are `eval/<suite>/…` (docs/howto/evaluation.md).
    Example: `{gsm8k: {dataset: {type: prompt, path: gsm8k.jsonl}}}`"""
    samples: Annotated[PositiveInt, Unit("prompts")] | None = 512
    """Number of prompts, from the start of the dataset. `null` uses all."""
    n: PositiveInt = 1
    """Completions of each prompt; metrics are means over all completions. With several completions,
    evaluations also report `eval/pass@<k>` and `eval/maj@<k>` (docs/algorithms/evaluate.md).
    Example: `8`"""
    pass_score: float | None = None
    """Minimum reward of a correct completion, for pass@k and maj@k. Default: 1 if every reward is 1
    or 0 (`exact_match`, `math`, `code` with `score: all`); with other rewards, evaluations have
    no pass@k and maj@k. Example: `1.0`"""
    vote_pattern: Pattern | None = None
    """Regular expression that finds a completion's answer, the vote in maj@k. The vote is the last
    match, or the group in that match. A completion without a match has no vote. Default: the vote
    is the complete completion. Example: `'#### (.*)'`"""
    every_steps: PositiveInt | None = None
    """Steps between evaluations. `null` disables evaluations by steps. Example: `20`"""
    every_seconds: PositiveFloat | None = None
    """Time between evaluations. The run evaluates at the end of a step. `null` disables evaluations
    by time. Example: `1800`"""
    every_epochs: PositiveInt | None = None
    """Epochs of the training dataset between evaluations. `null` disables evaluations by epochs.
    Example: `1`"""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    keep_last: PositiveInt | None = None
    """Number of newest evaluations whose files stay in `evaluations/`, with the scores of each item
    (docs/algorithms/evaluate.md). A commit removes older files. Default: all. Example: `10`"""
    temperature: PositiveFloat = 1.0
    """Divisor of the logits in sampling."""
    greedy: bool = False
    """Always take the most probable token."""
    max_new_tokens: PositiveInt | None = None
    """Maximum number of tokens in a completion. Default: the value in `rollout`. Example: `1024`"""

    @property
    def attempts(self) -> tuple[int, ...]:
        """Each k of pass@k; maj@k has the same values except 1.

        Empty for a single completion, and without a minimum reward of a correct completion.
        """
        return subset_sizes(self.n) if self.n > 1 and self.pass_score is not None else ()

    @property
    def rates(self) -> tuple[str, ...]:
        """Names of the metrics over several completions, which have confidence intervals."""
        agreed = (f"maj@{k}" for k in self.attempts[1:])
        return (*(f"pass@{k}" for k in self.attempts), *agreed)

    @property
    def parts(self) -> dict[str, Evaluation]:
        """Mapping from a suite's name to its evaluation (`WHOLE` without suites)."""
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
            raise ValueError("has both dataset and suites; move dataset into the suites")
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
