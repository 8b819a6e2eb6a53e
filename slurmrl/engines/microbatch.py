"""Micro-batches by a token budget, and what data-parallel ranks agree on before they run them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from slurmrl.data.packing import microbatches, padded_microbatches
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import OUTPUTS, TOKENS, Outputs
from slurmrl.errors import UsageError
from slurmrl.models.config import Head
from slurmrl.parallel.groups import ParallelContext

OWN_STATS = ("loss", "grad_norm", "lr", "tokens", "denominator", "skipped", "vetoed")
"""What `Engine.train_batch` returns beside the loss function's statistics."""


@dataclass(frozen=True)
class MicrobatchSchedule:
    """How a rank's sample is worked through; all ranks have the same number of rounds, because
    each round holds collectives."""

    parts: tuple[tuple[int, ...], ...]
    """Item indices of this rank's micro-batches; rounds beyond them are empty."""
    count: int
    denominator: float
    """Sum over the ranks."""
    some_empty: bool
    """Whether any rank has no micro-batch at all."""

    @property
    def scale(self) -> float:
        return 1.0 / self.denominator

    def check(self, role: str) -> None:
        """Raise UsageError unless something of the batch trains the model."""
        if self.count == 0:
            raise UsageError(f"{role}: no rank has anything to train on")
        if not self.denominator:
            raise UsageError(f"{role}: no token of this batch counts, so it would train on nothing")

    def part(self, index: int) -> tuple[int, ...] | None:
        return self.parts[index] if index < len(self.parts) else None


def agree(
    sample: SequenceSample,
    max_tokens: int,
    denominator: float,
    context: ParallelContext,
    *,
    padded: bool = False,
) -> MicrobatchSchedule:
    """Cut the sample into micro-batches and learn what the other ranks have. ``padded``: their
    sequences are padded to the longest, which counts."""
    if padded:
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
    """Tokens of its longest sequence."""
    return max(max(lengths) for lengths in sample.lengths[TOKENS])


def no_outputs(head: Head, device: torch.device) -> Outputs:
    """The outputs of no tokens."""
    return {name: torch.empty(0, device=device) for name in OUTPUTS[head]}


def in_order(
    sample: SequenceSample, parts: Sequence[Sequence[int]], results: Sequence[Outputs]
) -> Outputs:
    """Per-token results of micro-batches, put back into the sample's order."""
    tokens = item_tokens(sample)
    found: dict[str, list[Tensor]] = {name: [torch.empty(0)] * sample.bs for name in results[0]}
    for part, outputs in zip(parts, results, strict=True):
        for name, values in outputs.items():
            pieces = torch.split(values, [tokens[index] for index in part])
            for index, piece in zip(part, pieces, strict=True):
                found[name][index] = piece
    return {name: torch.cat(pieces) for name, pieces in found.items()}


class Sums:
    """Sums of scalars over micro-batches, then over ranks, in float64."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            value = value.detach().to(self._device, torch.float64)
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def add_loss(
        self, role: str, sample: SequenceSample, loss: Tensor, stats: Mapping[str, Tensor]
    ) -> Tensor:
        """Add what a loss function returned for a micro-batch, and its tokens; returns the loss.

        Raises UsageError for statistics that are named like the engine's own.
        """
        clash = sorted(set(stats) & set(OWN_STATS))
        if clash:
            raise UsageError(f"{role}: the loss returns statistics named {clash}")
        tokens = torch.tensor(float(sample.tensor(TOKENS).shape[0]))
        self.add({**stats, "loss": loss, "tokens": tokens})
        return loss

    def over_ranks(self, context: ParallelContext, *, some_empty: bool) -> dict[str, float]:
        """The totals. Names come from the ranks that had work, which all have the same."""
        names = sorted(self._sums)
        if some_empty and context.dp_size > 1:
            names = _names_of_any(names, context)
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        total = torch.stack([self._sums.get(name, zero) for name in names])
        if context.dp_size > 1:
            dist.all_reduce(total, group=context.group("dp"))
        return dict(zip(names, total.tolist(), strict=True))


def _gather(values: list[float], context: ParallelContext) -> list[list[float]]:
    """The values of all data-parallel ranks, in rank order."""
    if context.dp_size == 1:
        return [values]
    own = torch.tensor(values, dtype=torch.float64, device=context.device)
    found = own.new_empty(context.dp_size * len(values))
    dist.all_gather_single(found, own, group=context.group("dp"))
    rows: list[list[float]] = found.view(context.dp_size, -1).tolist()
    return rows


def _names_of_any(names: list[str], context: ParallelContext) -> list[str]:
    """The names of a rank that has some: those without send zeros into a maximum.

    Raises UsageError where ranks have different ones.
    """
    text = json.dumps(names).encode() if names else b""
    group = context.group("dp")
    size = torch.tensor(len(text), device=context.device)
    dist.all_reduce(size, dist.ReduceOp.MAX, group=group)
    padded = torch.zeros(int(size), dtype=torch.int32)
    padded[: len(text)] = torch.tensor(list(text), dtype=torch.int32)
    padded = padded.to(context.device)
    dist.all_reduce(padded, dist.ReduceOp.MAX, group=group)
    found = bytes(padded.tolist())
    if names and found != text:
        raise UsageError(
            f"the loss returns other statistics on another rank than here ({', '.join(names)}): "
            "it must return the same names for every micro-batch"
        )
    named: list[str] = json.loads(found)
    return named
