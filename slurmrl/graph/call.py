"""The nodes of the dataflow graph, the models they use, the keys that the dataset provides, and the
results that come out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple, TypeAlias

Head: TypeAlias = Literal["lm", "value"]
DATASET_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "prompt": ("prompt_ids",),
    "prompt_answer": ("input_ids", "prompt_mask"),
    "preference": ("input_ids", "prompt_mask"),
    "kto": ("input_ids", "prompt_mask", "desirable"),
    "messages": ("input_ids", "prompt_mask"),
}
"""The keys that each type of dataset feeds into the graph."""


REWARD_MODEL: Final = "reward_model"
"""The role that scores completions for the reward ``model``."""


class Method(StrEnum):
    """What a call does with its model."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN_STEP = "train_step"
    FILTER = "filter"
    """Chooses items. Only those that it accepts go through the calls after it."""
    RECORD = "record"
    """Writes a line about each item to the results of the trial."""


@dataclass(frozen=True)
class Call:
    """One model function call. ``interface`` is the ``module:Class`` that implements ``method``. A
    call without a role (a rule reward) needs no model."""

    name: str
    role: str | None
    method: Method
    interface: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    """Names of the metrics that it reports; a user's own reward may add more."""


Record: TypeAlias = Mapping[str, Any]
"""A line of the results of a trial, about one item: JSON values."""


class Measure(StrEnum):
    """How the scores of all items become one number."""

    MEAN = "mean"
    PART_MEAN = "part_mean"
    """A mean over the items that have the score."""
    RATE = "rate"
    """A mean of values between 0 and 1."""
    REWARD = "reward"
    """A mean of rewards: a rate if all ``rewards`` of all items are 0 or 1."""
    LOSS = "loss"
    """The mean of -log p over all ``tokens`` of answers, from each item's ``logprob``."""
    PERPLEXITY = "perplexity"
    """Its exponential."""

    def score(self, metric: str) -> str:
        """The score from which a metric is computed: the one of its name, except for losses."""
        return "logprob" if self in (Measure.LOSS, Measure.PERPLEXITY) else metric


class Estimate(NamedTuple):
    """A value and its 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """What all lines of the results of a trial amount to."""

    estimates: Mapping[str, Estimate]
    """By the name of the metric."""
    scores: Sequence[Record]
    """A short line about each item, in the order of the results."""

    @property
    def metrics(self) -> dict[str, float]:
        """The estimates and the ends of their intervals."""
        metrics: dict[str, float] = {}
        for name, (value, low, high) in self.estimates.items():
            metrics |= {name: value, f"{name}/low": low, f"{name}/high": high}
        return metrics


@dataclass(frozen=True)
class Refill:
    """How a step fills its batch where a filter drops items. Rounds of candidates go through the
    calls up to the filter until the batch is full."""

    rounds: int = 1
    """Maximum number of rounds in a step."""
    candidates: int | None = None
    """Items of a round; None: as many as a batch has."""
    complete: bool = False
    """Whether a batch that is still short after these rounds is an error."""


@dataclass(frozen=True)
class RoleUse:
    """How an algorithm uses a model role. ``head`` is the layer on top of the decoder: a language
    model's or a scalar value's."""

    role: str
    trained: bool
    head: Head = "lm"
