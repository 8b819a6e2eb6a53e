"""Settings of runs over a dataset without training. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, Final, Literal, Self

from slurmrl.algorithms.schema import (
    PAIR_SCORES,
    TURN_REWARDS,
    AlgorithmSchema,
    generate_call,
    reward_calls,
    sequences_of_pairs,
)
from slurmrl.config.schema import Config
from slurmrl.config.schema.base import Word
from slurmrl.config.schema.evaluation import Pattern
from slurmrl.config.source import KeyPath
from slurmrl.plan.checks.completion_checks import no_rates, useless_pattern
from slurmrl.plan.dataflow import Call, Method, Record, RoleUse, Summary
from slurmrl.registry import resolve

INTERFACES: Final = "slurmrl.algorithms.offline"
SUMMARIES: Final = "slurmrl.algorithms.summaries"
"""Module of the summaries, which is imported only when a run ends."""

Measure = Literal["completions", "preferences", "likelihood"]
MEASURED: Final[dict[Measure, tuple[str, ...]]] = {
    "completions": ("prompt",),
    "preferences": ("preference",),
    "likelihood": ("prompt_answer", "messages"),
}
"""Types of datasets that each measure accepts."""


class Generate(AlgorithmSchema):
    """Sampling of `rollout.n` completions for each prompt of the dataset, without training.

    The completions are in `results.jsonl`, with scores if the configuration has a reward. The run
    ends after the last row. The run resumes after any interruption, and the results have each row
    exactly once.
    """

    name: Literal["generate"] = "generate"
    """Name of the algorithm."""
    logprobs: bool = False
    """Record the token ids of each completion and their log-probabilities at `rollout.temperature`,
    computed over the whole vocabulary, even with `top_k` or `top_p`."""

    dataset_types: ClassVar[tuple[str, ...]] = ("prompt",)
    one_pass: ClassVar[bool] = True

    def roles(self) -> tuple[RoleUse, ...]:
        return (RoleUse("actor", trained=False),)

    def calls(self, config: Config) -> tuple[Call, ...]:
        turns = config.rollout.episode.has_turns
        scoring = reward_calls(config) if config.reward is not None or turns else ()
        record = completions_call(config, logprobs=self.logprobs, rewards=bool(scoring))
        return (generate_call(config), *scoring, record)


class Evaluate(AlgorithmSchema):
    """Evaluate a model on a whole dataset; write `results.jsonl` and `summary.json`.

    No model is trained. With `measure: completions`, the reward scores `rollout.n` completions of
    each prompt. The results are `avg@n`, `pass@k` and `maj@k`, with 95 % confidence intervals.
    """

    name: Literal["evaluate"] = "evaluate"
    """Name of the algorithm."""
    measure: Measure = "completions"
    """Quantity that the evaluation measures.

    - `completions`: rewards of completions of prompts.
    - `preferences`: how often a reward model prefers the chosen answer of a pair.
    - `likelihood`: loss and perplexity of given answers."""
    pass_score: float | None = None
    """With `completions`: minimum reward of a correct completion, for pass@k and maj@k. Default:
    the default of `evaluation.pass_score`. Example: `1.0`"""
    vote_pattern: Pattern | None = None
    """With `completions`: regular expression that finds a completion's answer, the vote in maj@k.
    The vote is the last match, or the group in that match. A completion without a match has no
    vote. Default: the vote is the complete completion. Example: `'#### (.*)'`"""

    suite: Word | None = None
    """Name of the suite of `evaluation.suites` that this trial evaluates; `slurmrl eval` sets it.
    Metrics in the trial of the evaluated checkpoint include this name. Default: none. Example:
    `gsm8k`"""

    dataset_types: ClassVar[tuple[str, ...]] = tuple(
        kind for kinds in MEASURED.values() for kind in kinds
    )
    one_pass: ClassVar[bool] = True

    def completed(self, config: Config) -> Self:
        if self.pass_score is not None or self.measure != "completions":
            return self
        return self.model_copy(update={"pass_score": config.default_pass_score})

    def roles(self) -> tuple[RoleUse, ...]:
        head: Literal["lm", "value"] = "value" if self.measure == "preferences" else "lm"
        return (RoleUse("actor", trained=False, head=head),)

    def sequences_per_item(self, config: Config) -> int:
        if self.measure == "preferences":
            return sequences_of_pairs(config)
        return super().sequences_per_item(config)

    def calls(self, config: Config) -> tuple[Call, ...]:
        if self.measure == "preferences":
            return (scores_call(), record_call("PairRecords", ("input_ids", "model_scores")))
        if self.measure == "likelihood":
            inputs = ("input_ids", "prompt_mask")
            return (likelihood_call(), record_call("LikelihoodRecords", (*inputs, "answer_logps")))
        record = completions_call(config, logprobs=False, rewards=True)
        return (generate_call(config), *reward_calls(config), record)

    def conflicts(self, config: Config) -> Iterator[tuple[KeyPath, str]]:
        kind = config.dataset.kind
        if kind in self.dataset_types and kind not in MEASURED[self.measure]:
            fitting = next(measure for measure, kinds in MEASURED.items() if kind in kinds)
            message = (
                f"'{self.measure}' is not allowed with a dataset of type {kind}; allowed: {fitting}"
            )
            yield ("algorithm", "measure"), message
        fields = type(self).model_fields
        for name in ("pass_score", "vote_pattern") if self.measure != "completions" else ():
            if getattr(self, name) != fields[name].default:
                message = f"is not allowed with measure {self.measure}, which does not use it"
                yield ("algorithm", name), message
        if self.vote_pattern is not None and self._unscored:
            message = useless_pattern(self.vote_pattern, "algorithm.pass_score")
            yield ("algorithm", "vote_pattern"), message

    def notes(self, config: Config) -> Iterator[str]:
        if self._unscored:
            yield no_rates(config, "algorithm.pass_score")

    @property
    def _unscored(self) -> bool:
        return self.measure == "completions" and self.pass_score is None

    def summarize(self, config: Config, records: Iterable[Record]) -> Summary | None:
        summary: Summary
        if self.measure != "completions":
            summary = resolve(f"{SUMMARIES}:of_{self.measure}")(records)
            return summary
        of_completions = resolve(f"{SUMMARIES}:of_completions")
        summary = of_completions(
            records, n=config.rollout.n, pass_score=self.pass_score, pattern=self.vote_pattern
        )
        return summary


def record_call(interface: str, inputs: tuple[str, ...]) -> Call:
    """Return the call that records a line about each item."""
    return Call(
        name="record",
        role=None,
        method=Method.RECORD,
        interface=f"{INTERFACES}:{interface}",
        inputs=inputs,
    )


def completions_call(config: Config, *, logprobs: bool, rewards: bool) -> Call:
    turns = config.rollout.episode.has_turns
    optional = {"logprobs": logprobs, "rewards": rewards, TURN_REWARDS: turns}
    more = (key for key, wanted in optional.items() if wanted)
    return record_call("CompletionRecords", ("input_ids", "prompt_mask", "finished", *more))


def scores_call() -> Call:
    """Return the call in which the reward model scores both answers of each pair."""
    return Call(
        name="actor_scores",
        role="actor",
        method=Method.INFERENCE,
        interface=PAIR_SCORES,
        inputs=("input_ids", "prompt_mask"),
        outputs=("model_scores",),
        metrics=("model_score",),
    )


def likelihood_call() -> Call:
    """Return the call that computes log-probabilities of whole answers."""
    return Call(
        name="actor_inf",
        role="actor",
        method=Method.INFERENCE,
        interface=f"{INTERFACES}:LikelihoodInterface",
        inputs=("input_ids", "prompt_mask"),
        outputs=("answer_logps",),
        metrics=("loss",),
    )
