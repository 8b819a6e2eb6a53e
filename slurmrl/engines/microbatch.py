"""Micro-batches within a token budget, and their schedule, common to data-parallel ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor
from torch import distributed as dist

from slurmrl.data.packing import microbatches, padded_microbatches
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import MAXIMUM, OUTPUTS, TOKENS, Outputs
from slurmrl.engines.prefixes import shared_microbatches
from slurmrl.errors import UsageError
from slurmrl.models.config import Head
from slurmrl.tensors.ops import collectives
from slurmrl.tensors.parallel.groups import ParallelContext

OWN_STATS = ("loss", "grad_norm", "lr", "tokens", "denominator", "skipped", "vetoed")
"""Statistics of `Engine.train_batch` itself, besides those of the loss function."""


@dataclass(frozen=True)
class MicrobatchSchedule:
    """The micro-batches of a rank. All ranks run the same number of them, because each contains
    collectives."""

    parts: tuple[tuple[int, ...], ...]
    """Item indices of this rank's micro-batches; further ones, up to ``count``, are empty."""
    count: int
    denominator: float
    """Sum over the ranks."""
    some_empty: bool
    """Whether any rank has no micro-batch at all."""

    @property
    def scale(self) -> float:
        return 1.0 / self.denominator

    def check(self, role: str) -> None:
        """Raise UsageError if the batch has no token to train on."""
        if self.count == 0:
            raise UsageError(f"{role}: the batch is empty on every rank")
        if not self.denominator:
            raise UsageError(f"{role}: no token of this batch counts for the loss")

    def part(self, index: int) -> tuple[int, ...] | None:
        return self.parts[index] if index < len(self.parts) else None


def agree(
    sample: SequenceSample,
    max_tokens: int,
    denominator: float,
    context: ParallelContext,
    *,
    padded: bool = False,
    shared: bool = False,
) -> MicrobatchSchedule:
    """Cut the sample into micro-batches and exchange their numbers with the other ranks.
    With ``padded``, sequences are padded to the longest, and the padding counts as tokens. With
    ``shared``, a prefix that adjacent sequences share counts once in a micro-batch."""
    if shared:
        cut = shared_microbatches(sample, max_tokens)
    elif padded:
        cut = padded_microbatches(sample.lengths[TOKENS], max_tokens)
    else:
        cut = microbatches(item_tokens(sample), max_tokens)
    parts = tuple(map(tuple, cut))
    ranks = _gather([float(len(parts)), denominator], context)
    counts = [int(count) for count, _ in ranks]
    whole = sum(share for _, share in ranks)
    return MicrobatchSchedule(parts, max(counts), whole, min(counts) == 0)


def item_tokens(sample: SequenceSample) -> list[int]:
    """Tokens of each item, all its sequences together."""
    return [sum(lengths) for lengths in sample.lengths[TOKENS]]


def longest(sample: SequenceSample) -> int:
    """Number of tokens of the longest sequence."""
    return max(max(lengths) for lengths in sample.lengths[TOKENS])


def no_outputs(head: Head, device: torch.device) -> Outputs:
    """Empty outputs, for a sample without tokens."""
    return {name: torch.empty(0, device=device) for name in OUTPUTS[head]}


def in_order(
    sample: SequenceSample, parts: Sequence[Sequence[int]], results: Sequence[Outputs]
) -> Outputs:
    """Per-token results of micro-batches in the sample's order."""
    tokens = item_tokens(sample)
    by_name: dict[str, list[Tensor]] = {name: [torch.empty(0)] * sample.bs for name in results[0]}
    for part, outputs in zip(parts, results, strict=True):
        for name, values in outputs.items():
            pieces = torch.split(values, [tokens[index] for index in part])
            for index, piece in zip(part, pieces, strict=True):
                by_name[name][index] = piece
    return {name: torch.cat(pieces) for name, pieces in by_name.items()}


class Sums:
    """Sums of scalars over micro-batches, then over ranks, in float64. Of those whose name ends in
    `MAXIMUM`, the maxima."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._tokens = 0

    def add(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            value = value.detach().to(self._device, torch.float64)
            if name in self._sums:
                join = torch.maximum if name.endswith(MAXIMUM) else torch.add
                value = join(self._sums[name], value)
            self._sums[name] = value

    def add_loss(
        self, role: str, sample: SequenceSample, loss: Tensor, stats: Mapping[str, Tensor]
    ) -> Tensor:
        """Add a micro-batch's statistics, loss and number of tokens. Return the loss.

        Raises UsageError for statistics with the names of the engine's own.
        """
        clash = sorted(set(stats) & set(OWN_STATS))
        if clash:
            names = ", ".join(clash)
            raise UsageError(
                f"{role}: the loss function returns statistics named {names}, which the engine "
                "reports itself; give them other names"
            )
        self.add({**stats, "loss": loss})
        self._tokens += sample.tensor(TOKENS).shape[0]
        return loss

    def over_ranks(self, context: ParallelContext, *, some_empty: bool) -> dict[str, float]:
        """Return the totals. The names are those of the ranks that had a micro-batch."""
        if self._tokens:
            tokens = torch.full((), self._tokens, dtype=torch.float64, device=self._device)
            self._sums["tokens"] = tokens
        names = sorted(self._sums)
        if some_empty and context.dp_size > 1:
            names = _names_of_any(names, context)
        names.sort(key=lambda name: name.endswith(MAXIMUM))
        total = torch.stack([self._sums.get(name, self._neutral(name)) for name in names])
        if context.dp_size > 1:
            group = context.group("dp")
            first = sum(not name.endswith(MAXIMUM) for name in names)
            dist.all_reduce(total[:first], group=group)
            if first < len(names):
                dist.all_reduce(total[first:], dist.ReduceOp.MAX, group=group)
        return dict(zip(names, total.tolist(), strict=True))

    def _neutral(self, name: str) -> Tensor:
        value = -inf if name.endswith(MAXIMUM) else 0.0
        return torch.full((), value, dtype=torch.float64, device=self._device)


def _gather(values: list[float], context: ParallelContext) -> list[list[float]]:
    """The values of all data-parallel ranks, in rank order."""
    if context.dp_size == 1:
        return [values]
    own = torch.tensor(values, dtype=torch.float64, device=context.device)
    gathered = collectives.gathered(own, context.group("dp"))
    rows: list[list[float]] = gathered.view(context.dp_size, -1).tolist()
    return rows


def _names_of_any(names: list[str], context: ParallelContext) -> list[str]:
    """Return the names of the ranks that have some. (Ranks without names contribute zeros to a
    maximum.)

    Raises UsageError if ranks have different names.
    """
    text = json.dumps(names).encode() if names else b""
    group = context.group("dp")
    size = torch.tensor(len(text), device=context.device)
    dist.all_reduce(size, dist.ReduceOp.MAX, group=group)
    padded = torch.zeros(int(size), dtype=torch.int32)
    padded[: len(text)] = torch.tensor(list(text), dtype=torch.int32)
    padded = padded.to(context.device)
    dist.all_reduce(padded, dist.ReduceOp.MAX, group=group)
    encoded = bytes(padded.tolist())
    if names and encoded != text:
        raise UsageError(
            f"the loss function returns the statistics {', '.join(names)} on this rank and others "
            "on another rank: it must return the same names for every micro-batch"
        )
    named: list[str] = json.loads(encoded)
    return named
