"""How many sequences a step has, and how long they can be."""

from __future__ import annotations

from dataclasses import dataclass

from slurmrl.config.schema import Config, Dataset
from slurmrl.plan.algorithms import Algorithm
from slurmrl.plan.estimates.shape import ModelShape


@dataclass(frozen=True)
class Lengths:
    """``sequences`` of one step over all ranks; ``longest`` in tokens."""

    sequences: int
    longest: int
    new_tokens: int
    """Tokens of it that are generated."""
    assumed: bool
    """The configuration bounds no prompts, and ``longest`` is what the model has positions for."""


def lengths_of(config: Config, algorithm: Algorithm, shape: ModelShape | None) -> Lengths | None:
    """None where nothing bounds the sequences."""
    new = config.rollout.max_new_tokens if config.dataset.type == "prompt" else 0
    sequences = algorithm.batch_size * int(getattr(algorithm, "group_size", 1))
    bound = longest(config.dataset, new)
    if bound is not None:
        return Lengths(sequences, bound, new, assumed=False)
    if shape is None or shape.positions is None:
        return None
    return Lengths(sequences, max(shape.positions, new), new, assumed=True)


def longest(dataset: Dataset, new_tokens: int) -> int | None:
    """Tokens of its longest sequence, completions of ``new_tokens`` included; None where nothing
    bounds it."""
    if dataset.type == "prompt":
        prompt = dataset.max_prompt_tokens
        return None if prompt is None else prompt + new_tokens
    return dataset.max_tokens
