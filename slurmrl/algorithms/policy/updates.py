"""A step's optimizer updates: minibatches and epochs over a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import isfinite
from typing import TYPE_CHECKING

import torch

from slurmrl.algorithms.base import CallResult
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.data.packing import even_sizes
from slurmrl.data.sample import SequenceSample
from slurmrl.errors import UsageError

if TYPE_CHECKING:
    from slurmrl.engines.base import LossFn, TrainEngine

MeanStats = dict[str, float]
ENGINE_STATS = ("loss", "grad_norm", "lr", "tokens", "denominator", "skipped", "vetoed")
"""The engine's results besides the sums of the loss function's statistics."""


def run_updates(
    engine: TrainEngine,
    sample: SequenceSample,
    batch: tuple[str, ...],
    mask_key: str,
    loss_fn: LossFn,
    ppo: PolicyGradient,
    *,
    temperature: float = 1.0,
    stop: Callable[[MeanStats], bool] | None = None,
) -> MeanStats:
    """Make one optimizer step for each minibatch, in ``n_epochs`` passes. ``batch`` has the ids of
    all ranks' items in order; ``sample`` has this rank's items.

    The bool tensor under ``mask_key`` selects the tokens that count. Every rank makes the same
    steps: a minibatch without such a token on any rank is skipped. If ``stop`` returns True for a
    minibatch's global means, its update and all later ones are skipped.

    :return: global means over the tokens of all processed minibatches; the mean ``grad_norm`` of
        the updates; the last ``lr``; the number of ``updates``, and of those that the engine
        ``skipped``; with ``stop``, ``early_stop`` = 1 if it stopped.
    """
    parts = minibatches(sample, batch, ppo.n_minibatches)
    own = torch.stack([part.tensor(mask_key).sum() for part in parts]).double()
    total = engine.all_reduce_sum(own.clone())
    counts, totals = torch.stack([own, total]).tolist()
    schedule = [index for index, size in enumerate(totals) if size > 0]
    if not schedule:
        raise UsageError("no token of this batch counts for the loss: there is nothing to train on")
    veto = None if stop is None else lambda result: stop(_means([result]))
    results: list[dict[str, float]] = []
    for index in schedule * ppo.n_epochs:
        result = engine.train_batch(
            parts[index], loss_fn, counts[index], temperature=temperature, veto=veto
        )
        results.append(result)
        if result["vetoed"]:
            break
    means = _summary(results)
    if stop is not None:
        means["early_stop"] = sum(result["vetoed"] for result in results)
    return means


def minibatches(sample: SequenceSample, batch: tuple[str, ...], count: int) -> list[SequenceSample]:
    """The sequences of ``sample`` in each of ``count`` parts of a batch, of consecutive items."""
    numbers = {
        name: number
        for number, (start, stop) in enumerate(
            pairwise(accumulate(even_sizes(len(batch), count), initial=0))
        )
        for name in batch[start:stop]
    }
    items: list[list[int]] = [[] for _ in range(count)]
    for index, name in enumerate(sample.ids):
        items[numbers[name]].append(index)
    return [sample.take(part).sequences() for part in items]


def global_result(means: MeanStats, role: str) -> CallResult:
    """The result of a train_step from numbers that are the same on every rank. Metrics that every
    trained model has get the role's name as a prefix."""
    shared = ("grad_norm", "lr", "updates", "skipped")
    named = {f"{role}_{key}" if key in shared else key: mean for key, mean in means.items()}
    return CallResult(stats={key: (mean, 1.0) for key, mean in named.items()})


def _summary(results: list[dict[str, float]]) -> MeanStats:
    made = [result for result in results if not result["vetoed"]]
    norms = [result["grad_norm"] for result in made if isfinite(result["grad_norm"])]
    return {
        **_means(results),
        "grad_norm": sum(norms) / max(len(norms), 1),
        "lr": (made or results)[-1]["lr"],
        "updates": float(len(made)),
        "skipped": sum(result["skipped"] for result in made),
    }


def _means(results: Sequence[Mapping[str, float]]) -> MeanStats:
    """Means of the loss function's statistics over all tokens."""
    total = sum(result["denominator"] for result in results)
    names = [name for name in results[0] if name not in ENGINE_STATS]
    return {name: sum(result[name] for result in results) / total for name in names}
