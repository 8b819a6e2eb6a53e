"""A step's optimizer updates: minibatches and epochs over one rank's part of the batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from math import isfinite
from typing import TYPE_CHECKING

import torch

from slurmrl.algorithms.base import CallResult
from slurmrl.algorithms.ppo.schema import PPO
from slurmrl.data.packing import even_sizes
from slurmrl.data.sample import SequenceSample

if TYPE_CHECKING:
    from slurmrl.engines.base import Engine, LossFn

MeanStats = dict[str, float]
ENGINE_STATS = ("loss", "grad_norm", "lr", "tokens", "denominator", "skipped")
"""What the engine reports besides the sums of the loss function's statistics."""


def run_updates(
    engine: Engine,
    sample: SequenceSample,
    mask_key: str,
    loss_fn: LossFn,
    ppo: PPO,
    *,
    temperature: float = 1.0,
    stop: Callable[[MeanStats], bool] = lambda means: False,
) -> MeanStats:
    """Go ``n_epochs`` times through ``n_minibatches`` contiguous parts, one optimizer step each.

    The bool tensor under ``mask_key`` picks the tokens that count. Every rank makes the same
    steps: a part that holds no such token on any rank is left out, and ``stop`` (given a
    minibatch's global means, it ends the updates of this step) sees the same numbers everywhere.

    :return: global means over the tokens of all updates; of ``grad_norm``, over the updates; the
        last ``lr``; the number of ``updates``, and how many the engine ``skipped``.
    """
    cuts = [0, *accumulate(even_sizes(sample.bs, ppo.n_minibatches))]
    parts = [sample.slice(start, stop) for start, stop in pairwise(cuts)]
    counts = [float(part.tensor(mask_key).sum()) for part in parts]
    device = sample.tensor(mask_key).device
    total = engine.all_reduce_sum(torch.tensor(counts, dtype=torch.float64, device=device))
    schedule = [index for index, size in enumerate(total.tolist()) if size > 0]
    results: list[dict[str, float]] = []
    for index in schedule * ppo.n_epochs:
        result = engine.train_batch(parts[index], loss_fn, counts[index], temperature=temperature)
        results.append(result)
        if stop(_means([result])):
            break
    return _means(results)


def global_result(means: MeanStats, role: str) -> CallResult:
    """Numbers that are the same on every rank, as a train_step's result; those that every trained
    model has carry the role's name."""
    shared = ("grad_norm", "lr", "updates", "skipped")
    named = {f"{role}_{key}" if key in shared else key: mean for key, mean in means.items()}
    return CallResult(stats={key: (mean, 1.0) for key, mean in named.items()})


def _means(results: list[dict[str, float]]) -> MeanStats:
    if not results:
        return {"updates": 0.0}
    sums = {key: sum(result[key] for result in results) for key in results[0]}
    means = {key: sums[key] / sums["denominator"] for key in results[0] if key not in ENGINE_STATS}
    norms = [result["grad_norm"] for result in results if isfinite(result["grad_norm"])]
    means["grad_norm"] = sum(norms) / max(len(norms), 1)
    means["lr"] = results[-1]["lr"]
    means["updates"] = float(len(results))
    means["skipped"] = sums["skipped"]
    return means
