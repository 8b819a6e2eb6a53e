"""A step's optimizer updates: minibatches and epochs over a batch.

The loss of a minibatch is the sum of the tokens' weighted losses divided by the sum of
denominators. Both sums are over all micro-batches and ranks, so the result does not depend on the
division into micro-batches or on the number of ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slurmrl import log
from slurmrl.algorithms.base import CallContext, CallResult
from slurmrl.algorithms.policy.hyperparameters import Updates
from slurmrl.algorithms.policy.objective import LOSS_WEIGHTS, mismatch_metrics
from slurmrl.algorithms.sequences import Sequences
from slurmrl.data.order import even_sizes
from slurmrl.data.sample import SequenceSample
from slurmrl.tensors.ops.arguments import upload

if TYPE_CHECKING:
    from slurmrl.engines.base import LossFn, TrainEngine


logger = log.get(__name__)

MeanStats = dict[str, float]
ENGINE_STATS = ("loss", "grad_norm", "lr", "tokens", "denominator", "skipped", "vetoed")
"""Names of the engine's results that are not statistics of the loss function."""
LOSS_STATS = ("actor/loss", "actor_loss", "kl_loss", "value_loss")
"""Statistics that are weighted like the loss. Other statistics are sums over tokens."""
MISMATCH = "mismatch_"
"""Prefix of statistics that are reported only for the first minibatch."""


@dataclass(frozen=True)
class Minibatch:
    items: tuple[int, ...]
    """Positions of the items in this rank's sample."""
    denominator: float
    """This rank's part of the denominator."""
    tokens: float
    """Number of tokens that count, on all ranks."""


def run_updates(
    engine: TrainEngine,
    sample: SequenceSample,
    context: CallContext,
    mask_key: str,
    loss_fn: LossFn,
    settings: Updates,
    *,
    aggregation: str = "tokens",
    temperature: float = 1.0,
    stop: Callable[[MeanStats], bool] | None = None,
    prepare: Callable[[SequenceSample], SequenceSample] | None = None,
) -> MeanStats:
    """Make one optimizer step for each minibatch, in ``n_epochs`` passes.

    ``context.batch`` has the ids of all ranks' items in order; ``sample`` has this rank's items.

    The bool tensor under ``mask_key`` selects the tokens that count. All ranks make the same
    updates: a minibatch in which no token counts on any rank is skipped. If ``stop`` returns True
    for a minibatch's global means, this update and all later updates are skipped. ``prepare``
    changes a minibatch just before its update, and may be collective.

    :return: global means of the statistics over the tokens of all processed minibatches; the mean
        ``grad_norm`` of the updates; the last ``lr``; the number of ``updates``; the number of
        updates that the engine ``skipped``; with ``stop``, ``early_stop``, which is 1 after a stop;
        the mismatch metrics of the first minibatch, if the loss function has their sums. If no
        token of the batch counts, the result has only numbers of updates.
    """
    results: list[dict[str, float]] = []
    sizes: list[float] = []
    for minibatch in _minibatches(engine, sample, context, mask_key, settings, aggregation):
        size = minibatch.tokens
        part = sample.take(minibatch.items).sequences()
        result = engine.train_batch(
            part if prepare is None else prepare(part),
            loss_fn,
            minibatch.denominator,
            temperature=temperature,
            veto=None if stop is None else _veto(stop, size),
        )
        results.append(result)
        sizes.append(size)
        if result["vetoed"]:
            break
    if not results and engine.context.rank == 0:
        logger.warning(
            "step %d makes no update of the %s: no token of its batch is in the loss "
            "(algorithm.mask_truncated excludes completions without a stop token)",
            *(context.step, engine.role),
        )
    means = _summary(results, sizes)
    if stop is not None:
        means["early_stop"] = sum(result["vetoed"] for result in results)
    return means


def _veto(stop: Callable[[MeanStats], bool], size: float) -> Callable[[Mapping[str, float]], bool]:
    return lambda result: stop(_means([result], [size]))


def _minibatches(
    engine: TrainEngine,
    sample: SequenceSample,
    context: CallContext,
    mask_key: str,
    settings: Updates,
    aggregation: str,
) -> list[Minibatch]:
    """Return the minibatches of all epochs in order. Collective.

    The result omits minibatches in which no token counts on any rank.
    """
    parts = [
        part
        for epoch in range(settings.n_epochs)
        for part in split(sample.ids, _order(context, settings, epoch), settings.n_minibatches)
    ]
    values = item_shares(sample, mask_key, aggregation)
    owners = [part for part, items in enumerate(parts) for _ in items]
    places = [torch.tensor(x) for x in (owners, [item for part in parts for item in part])]
    owner, item = upload([place.long() for place in places], values.device)
    own = values.new_zeros(len(parts), 2).index_add(0, owner, values[item])
    total = engine.all_reduce_sum(own.clone())
    shares, totals = torch.stack([own, total]).tolist()
    return [
        Minibatch(tuple(part), share, size)
        for part, (share, _), (_, size) in zip(parts, shares, totals, strict=True)
        if size > 0
    ]


def _order(context: CallContext, settings: Updates, epoch: int) -> list[str]:
    """Return the batch's ids in the order in which an epoch trains on them.

    The order is a pure function of seed, step and epoch.
    """
    order = list(context.batch)
    if settings.shuffle_minibatches:
        key = f"slurmrl minibatches {context.seed} {context.step} {epoch}"
        random.Random(key).shuffle(order)
    return order


def split(ids: Sequence[str], order: Sequence[str], count: int) -> list[list[int]]:
    """Return, for each of ``count`` consecutive parts of ``order``, the positions in ``ids``."""
    numbers = {
        name: number
        for number, (start, stop) in enumerate(
            pairwise(accumulate(even_sizes(len(order), count), initial=0))
        )
        for name in order[start:stop]
    }
    items: list[list[int]] = [[] for _ in range(count)]
    for index, name in enumerate(ids):
        items[numbers[name]].append(index)
    return items


def global_result(means: MeanStats, role: str) -> CallResult:
    """Return the result of a train_step from means that are the same on every rank.

    Metrics that every trained model has get the role's name as a prefix.
    """
    shared = ("grad_norm", "lr", "updates", "skipped")
    named = {f"{role}_{key}" if key in shared else key: mean for key, mean in means.items()}
    return CallResult(stats={key: (mean, 1.0) for key, mean in named.items()})


def _summary(results: list[dict[str, float]], sizes: list[float]) -> MeanStats:
    if not results:
        return {"updates": 0.0, "skipped": 0.0}
    made = [result for result in results if not result["vetoed"]]
    norms = [result["grad_norm"] for result in made if isfinite(result["grad_norm"])]
    means = {
        **_means(results, sizes),
        "grad_norm": sum(norms) / max(len(norms), 1),
        "lr": (made or results)[-1]["lr"],
        "updates": float(len(made)),
        "skipped": sum(result["skipped"] for result in made),
    }
    if any(name.startswith(MISMATCH) for name in results[0]):
        means |= mismatch_metrics(results[0], sizes[0])
    return means


def _means(results: Sequence[Mapping[str, float]], sizes: Sequence[float]) -> MeanStats:
    """Return the means of statistics over all tokens. ``sizes`` are the results' token counts."""
    tokens, denominator = sum(sizes), sum(result["denominator"] for result in results)
    names = [
        name for name in results[0] if name not in ENGINE_STATS and not name.startswith(MISMATCH)
    ]
    return {
        name: sum(result[name] for result in results)
        / (denominator if name in LOSS_STATS else tokens)
        for name in names
    }


def token_weights(
    mask: Tensor, sequences: Sequences, aggregation: str, length: float
) -> Tensor | None:
    """Return the weight of each token's loss; None if all weights are 1.

    ``mask`` is True on all response tokens.

    - ``tokens``: all tokens count equally (Yu et al. 2025, "DAPO", eq. 8).
    - ``sequences``: the mean over sequences of the means over their tokens (Shao et al. 2024,
      "DeepSeekMath", eq. 3).
    - ``constant``: the mean over sequences of sums over tokens, divided by ``length`` (Dr. GRPO:
      Liu et al. 2025, "Understanding R1-Zero-like training").
    """
    if aggregation == "tokens":
        return None
    counted = mask.float()
    if aggregation == "constant":
        return counted / length
    return counted / sequences.totals(counted).clamp(min=1.0)


def item_shares(sample: SequenceSample, mask_key: str, aggregation: str) -> Tensor:
    """Return [items, 2] float64: part of the denominator, and number of tokens that count.

    With ``tokens``, the part is the number of tokens that count. With other aggregations, the part
    is the number of sequences with response tokens, including sequences whose tokens do not count
    (their loss is 0).
    """
    mask = sample.tensor(mask_key)
    tokens = Sequences.of(sample.cu_seqlens(mask_key), mask.device)
    counts = torch.tensor([0, *(len(rows) for rows in sample.lengths[mask_key])])
    sequences = Sequences.of(counts.cumsum(0), mask.device)
    lengths = tokens.sums(mask.double())
    added = lengths
    if aggregation != "tokens":
        added = (tokens.sums(sample.tensor(LOSS_WEIGHTS)) > 0).double()
    return torch.stack([sequences.sums(added), sequences.sums(lengths)], dim=1)
