"""How completions are drawn: their number, the options, and the random streams."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.schema import routes, supports
from slurmrl.rollouts.generation.base import GenerationOptions


def completions(context: CallContext) -> int:
    """Completions of each prompt."""
    rollout, evaluation = context.settings.config.rollout, context.settings.config.evaluation
    return evaluation.n if context.evaluation and evaluation is not None else rollout.n


def generation_options(context: CallContext) -> GenerationOptions:
    """The settings of the rollout or of the evaluation, which uses neither top-k nor top-p."""
    config = context.settings.config
    rollout, evaluation = config.rollout, config.evaluation
    if context.evaluation and evaluation is not None:
        return GenerationOptions(
            max_new_tokens=evaluation.max_new_tokens or rollout.max_new_tokens,
            temperature=evaluation.temperature,
            greedy=evaluation.greedy,
            stop_token_ids=context.stop_token_ids,
            stop_strings=rollout.stop_strings,
        )
    return GenerationOptions(
        max_new_tokens=rollout.max_new_tokens,
        min_new_tokens=rollout.min_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        greedy=rollout.greedy,
        stop_token_ids=context.stop_token_ids,
        stop_strings=rollout.stop_strings,
        support=bool(supports(context.settings.algorithm, config)),
        experts=bool(routes(context.settings.algorithm, config)) and not rollout.greedy,
    )


def sampling_keys(ids: tuple[str, ...], completions: int = 1) -> Tensor:
    """[S] int64, a stable hash for each completion of each sample id.

    The tokens drawn for a completion depend on it, and not on the batch, the rank or the number of
    completions.
    """
    names = (stream(name, place) for name in ids for place in range(completions))
    return torch.tensor([sampling_key(name) for name in names], dtype=torch.int64)


def stream(name: str, place: int) -> str:
    """The first completion of a sample has the sample's own stream.

    (A sample id ends with ``@<epoch>``, so no other one can equal the name of a completion.)
    """
    return f"{name}#{place}" if place else name


def sampling_seed(context: CallContext) -> int:
    """The seed of the random streams."""
    return evaluation_seed(context.seed) if context.evaluation else context.seed


def evaluation_seed(seed: int) -> int:
    """The seed of the evaluation's own random stream, in 0..2^63-1."""
    return sampling_key(f"eval {seed}") & (2**63 - 1)


def sampling_key(name: str) -> int:
    """The random stream of a name, int64."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)
