"""Number and maximum length of the sequences of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from slurmrl.config.schema import Config, Dataset, evaluation_key
from slurmrl.config.source import KeyPath
from slurmrl.plan.algorithms import Algorithm
from slurmrl.plan.estimates.shape import ModelShape, shape_of
from slurmrl.registry import resolve

KEPT_BY_SERVERS: Final = 8
"""Tokens of a model's context that a server may keep for itself: 5 of SGLang's."""
LONGEST_ROW: Final = "slurmrl.data.records:longest_row"
"""Its layer is above the plan's, so it is resolved by name."""
TRAINING: Final = ("dataset",)
"""The key of the training dataset."""


@dataclass(frozen=True)
class Lengths:
    """``sequences`` counts those of a step on all ranks; ``longest`` is in tokens."""

    sequences: int
    longest: int
    new_tokens: int
    """Number of the ``longest`` tokens that are generated."""
    assumed: bool
    """Whether the configuration sets no bound, so that ``longest`` is the model's number of
    positions."""
    group: int = 1
    """Sequences of an item. A prompt is read once to generate all of its completions."""


def lengths_of(config: Config, algorithm: Algorithm, shape: ModelShape | None) -> Lengths | None:
    """The lengths of a step; None if neither the configuration nor the model bounds them."""
    new = config.rollout.most_tokens if config.dataset.kind == "prompt" else 0
    group = algorithm.sequences_per_item(config)
    sequences = algorithm.batch_size * group
    bound = longest(config.dataset, new)
    if bound is not None:
        return Lengths(sequences, bound, new, assumed=False, group=group)
    if shape is None or shape.positions is None:
        return None
    return Lengths(sequences, max(shape.positions, new), new, assumed=True, group=group)


def as_long_as_rows(config: Config, algorithm: Algorithm) -> Config:
    """Return the configuration with the longest row of the training data as the limit of lengths,
    if it allows longer ones: no micro-batch holds more than the data can fill."""
    dataset = config.dataset
    rows = resolve(LONGEST_ROW)(dataset)
    allowed = lengths_of(config, algorithm, shape_of(config.actor))
    if rows is None or allowed is None or rows + allowed.new_tokens >= allowed.longest:
        return config
    key = "max_prompt_tokens" if dataset.kind == "prompt" else "max_tokens"
    return config.model_copy(update={"dataset": dataset.model_copy(update={key: rows})})


def bounded_parts(config: Config) -> Iterator[tuple[KeyPath, Dataset, int]]:
    """The keys of the datasets of training and evaluation, with the most new tokens of each."""
    new = config.rollout.most_tokens
    yield TRAINING, config.dataset, new
    for suite, own in config.evaluations.items():
        assert own.evaluation is not None, "one of `evaluations`"
        limit = None if config.rollout.episode.has_turns else own.evaluation.max_new_tokens
        yield (*evaluation_key(suite), "dataset"), own.held_out, limit or new


def least_context(config: Config, *, assumed: bool = True) -> int:
    """Tokens of a prompt and its completion that a server must take, of the datasets for which
    servers generate; 0 if they are not bounded. ``assumed``: of a dataset that sets no bound, all
    that the model takes; else it does not count."""
    bounds = [
        longest(dataset, new_tokens)
        for where, dataset, new_tokens in bounded_parts(config)
        if dataset.kind == "prompt" and (where == TRAINING or config.rollout_evaluates)
    ]
    if not assumed:
        bounds = [bound for bound in bounds if bound is not None]
    shape = shape_of(config.actor)
    if shape is not None and shape.positions is not None:
        most = shape.positions - KEPT_BY_SERVERS
        bounds = [most if bound is None else min(bound, most) for bound in bounds]
    return max((bound or 0 for bound in bounds), default=0)


def longest(dataset: Dataset, new_tokens: int) -> int | None:
    """Tokens of the longest sequence, with a completion of ``new_tokens``; None if the dataset sets
    no bound."""
    if dataset.kind == "prompt":
        prompt = dataset.max_prompt_tokens
        return None if prompt is None else prompt + new_tokens
    return dataset.max_tokens
