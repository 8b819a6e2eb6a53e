"""Micro-batches within a token budget, with one schedule for all data-parallel ranks.

The module also handles records of generation (experts, sampling masks) and the prefixes that
adjacent sequences share.

A sample has T tokens; its pieces have N tokens, without repeated prefixes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch import distributed as dist

from slurmrl.data.meta import EXPERTS, IDS, SIZES, repeated
from slurmrl.data.order import row_microbatches
from slurmrl.data.sample import SequenceSample, pictures_of
from slurmrl.engines.base import MAXIMUM, OUTPUTS, TOKENS, OutputFn, Outputs
from slurmrl.errors import UsageError
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.base import PackedModel, RowKind
from slurmrl.models.decoder import Decoder
from slurmrl.models.experts import UNKNOWN, Replayed
from slurmrl.models.layer_parts import Pieces
from slurmrl.models.packed import ranges
from slurmrl.tensors.bins import best_fit
from slurmrl.tensors.ops import collectives
from slurmrl.tensors.ops.sampling import SamplingMasks
from slurmrl.tensors.parallel.groups import ParallelContext

if TYPE_CHECKING:
    from slurmrl.models.hf_model import HFModel  # transformers takes seconds to import
    from slurmrl.models.hf_routers import HFRouters

OWN_STATS = ("loss", "grad_norm", "lr", "tokens", "denominator", "skipped", "vetoed")
"""Statistics that `Engine.train_batch` adds to the loss function's statistics."""
SHORTEST = 16
"""Minimum length of a shared prefix, in tokens: a shorter prefix costs more than it saves."""
MOST = 64
"""Maximum number of sequences that share a prefix; further sequences process the prefix again."""


@dataclass(frozen=True)
class MicrobatchSchedule:
    """The micro-batches of a rank.

    All ranks run the same number of micro-batches, because micro-batches contain collectives.
    """

    parts: tuple[tuple[int, ...], ...]
    """Item indices of this rank's micro-batches. Further micro-batches, up to ``count``, are
    empty."""
    count: int
    denominator: float
    """Sum of the denominators over the ranks."""
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
    rows: RowKind | None = None,
    shared: bool = False,
) -> MicrobatchSchedule:
    """Cut the sample into micro-batches and exchange their number with the other ranks.

    With ``rows``, padding counts as tokens, and sequences with pictures do not share rows. With
    ``shared``, a prefix that adjacent sequences share counts once.
    """
    if shared:
        cut = shared_microbatches(sample, max_tokens)
    elif rows is not None:
        packed = rows == "packed" and not any(pictures_of(sample))
        cut = row_microbatches(sample.lengths[TOKENS], max_tokens, packed=packed)
    else:
        cut = best_fit(item_tokens(sample), max_tokens)
    parts = tuple(map(tuple, cut))
    ranks = _gather([float(len(parts)), denominator], context)
    counts = [int(count) for count, _ in ranks]
    whole = sum(share for _, share in ranks)
    return MicrobatchSchedule(parts, max(counts), whole, min(counts) == 0)


def item_tokens(sample: SequenceSample) -> list[int]:
    """Return the number of tokens of each item, over all its sequences."""
    return [sum(lengths) for lengths in sample.lengths[TOKENS]]


def longest(sample: SequenceSample) -> int:
    """Return the number of tokens of the longest sequence."""
    return max(max(lengths) for lengths in sample.lengths[TOKENS])


def in_order(
    sample: SequenceSample,
    parts: Sequence[Sequence[int]],
    results: Sequence[Outputs],
    head: Head,
    output_fn: OutputFn | None,
) -> Outputs:
    """Return the per-token results of micro-batches in the order of the sample.

    Without micro-batches, return the results of ``output_fn`` on empty outputs of ``head``.
    """
    if not results:
        device = sample.tensor(TOKENS).device
        nothing = {name: torch.empty(0, device=device) for name in OUTPUTS[head]}
        return nothing if output_fn is None else output_fn(nothing, sample)
    tokens = item_tokens(sample)
    by_name: dict[str, list[Tensor]] = {name: [torch.empty(0)] * sample.bs for name in results[0]}
    for part, outputs in zip(parts, results, strict=True):
        for name, values in outputs.items():
            pieces = torch.split(values, [tokens[index] for index in part])
            for index, piece in zip(part, pieces, strict=True):
                by_name[name][index] = piece
    return {name: torch.cat(pieces) for name, pieces in by_name.items()}


class Sums:
    """Sums of scalars over micro-batches, then over ranks, in float64.

    Scalars whose names end in `MAXIMUM` are not summed: their maximum is taken.
    """

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

        Raises UsageError if a statistic has a name of `OWN_STATS`.
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
        """Return the totals. Ranks that had a micro-batch provide the names."""
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
    """Return the values of all data-parallel ranks, in rank order."""
    if context.dp_size == 1:
        return [values]
    own = torch.tensor(values, dtype=torch.float64, device=context.device)
    gathered = collectives.gathered(own, context.group("dp"))
    rows: list[list[float]] = gathered.view(context.dp_size, -1).tolist()
    return rows


def _names_of_any(names: list[str], context: ParallelContext) -> list[str]:
    """Return the names from the ranks that have names.

    (The other ranks contribute zeros to a maximum over the encoded names.)

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


def replaying(decoder: PackedModel, sample: SequenceSample | None) -> AbstractContextManager[None]:
    """Use the recorded experts of a micro-batch in its forward and backward passes."""
    if sample is None or EXPERTS not in sample.keys:
        return nullcontext()
    if isinstance(decoder, Decoder):
        return decoder.routed(Replayed(experts_of(sample, decoder.config)))
    model = cast("HFModel", decoder)
    return model.routed(Replayed(experts_of(sample, model.routers)))


def showing(decoder: PackedModel, sample: SequenceSample) -> AbstractContextManager[None]:
    """Let a model of transformers read a micro-batch with its pictures, while entered."""
    paths = pictures_of(sample)
    if not any(paths):
        return nullcontext()
    counts = sample.sequence_counts(TOKENS)
    return cast("HFModel", decoder).showing(repeated(paths, counts))


def masks_of(sample: SequenceSample | None) -> SamplingMasks | None:
    """Return the sampling masks of a sample's tokens; None without top-k and top-p."""
    if sample is None or SIZES not in sample.keys:
        return None
    return SamplingMasks.of(sample.tensor(SIZES), sample.tensor(IDS))


def experts_of(sample: SequenceSample, model: ModelConfig | HFRouters) -> Tensor:
    """Return the recorded experts [T, L, K] of a sample's tokens.

    L is the number of blocks of ``model`` that have experts, K the number of experts per token.
    Tokens without a record have `UNKNOWN`. Raises UsageError if a record has a different size.
    """
    if isinstance(model, ModelConfig):
        blocks = 0 if model.moe is None else len(model.moe.layers)
        each = 0 if model.moe is None else model.moe.per_token
    else:
        blocks, each = model.blocks, model.per_token
    width = blocks * each
    tokens = list(chain.from_iterable(sample.lengths[TOKENS]))
    sizes = list(chain.from_iterable(sample.lengths[EXPERTS]))
    if any(size not in (0, count * width) for size, count in zip(sizes, tokens, strict=True)):
        raise UsageError(f"experts of the samples do not fit a model with {blocks} expert layers")
    parts = torch.split(sample.tensor(EXPERTS), sizes)
    rows: list[Tensor] = [
        part if len(part) else part.new_full((count * width,), UNKNOWN)
        for part, count in zip(parts, tokens, strict=True)
    ]
    experts = torch.cat(rows) if rows else sample.tensor(EXPERTS)
    return experts.view(sum(tokens), blocks, each)


@dataclass(frozen=True)
class SharedPrefix:
    """A prefix of ``length`` tokens that ``count`` adjacent sequences share."""

    first: int
    """Index in the sample of the first sequence that shares the prefix."""
    count: int
    length: int


@dataclass(frozen=True)
class SharedTokens:
    """A sample's tokens as pieces of its sequences: shared prefixes and suffixes."""

    taken: Tensor
    """[N]: index in the sample of each token of the pieces."""
    pieces: Pieces
    places: Tensor
    """[T]: index in the pieces of each token of the sample."""


def shared_tokens(sample: SequenceSample) -> SharedTokens | None:
    """Return the pieces of a sample on the CPU; None if its sequences share no prefix."""
    found = shared_prefixes(sample)
    if not found:
        return None
    leaders = {prefix.first: prefix for prefix in found}
    taken: list[tuple[int, int]] = []
    """The first token and the number of tokens of each piece."""
    prefixes: list[int] = []
    places: list[tuple[int, int]] = []
    begin = stored = until = parent = length = 0
    for sequence, tokens in enumerate(chain.from_iterable(sample.lengths[TOKENS])):
        if sequence in leaders:
            shared = leaders[sequence]
            length, until = shared.length, sequence + shared.count
            parent, of_prefix = len(taken), stored
            taken.append((begin, length))
            prefixes.append(-1)
            stored += length
        if sequence < until:
            rest = tokens - length
            taken.append((begin + length - 1, rest + 1))
            prefixes.append(parent)
            places += [(of_prefix, length), (stored + 1, rest)]
            stored += rest + 1
        else:
            taken.append((begin, tokens))
            prefixes.append(-1)
            places.append((stored, tokens))
            stored += tokens
        begin += tokens
    lengths = torch.tensor([0, *(size for _, size in taken)])
    pieces = Pieces(lengths.cumsum(0).to(torch.int32), torch.tensor(prefixes))
    return SharedTokens(_joined(taken), pieces, _joined(places))


def shared_prefixes(sample: SequenceSample) -> list[SharedPrefix]:
    """Return the shared prefixes that save the most tokens, in order.

    A prefix has at least `SHORTEST` tokens and up to `MOST` sequences. Each sequence has at most
    one prefix, and at least one token after it.
    """
    common = _common_tokens(sample)
    saved = [0] * (len(common) + 2)
    """For each sequence, the maximum number of tokens that it and later sequences can save."""
    choices = [(1, 0)] * (len(common) + 1)
    """For each sequence: number of sequences from here that share a prefix, and its length."""
    for first in reversed(range(len(common))):
        saved[first], length = saved[first + 1], common[first]
        for count, tokens in enumerate(common[first : first + MOST - 1], 2):
            length = min(length, tokens)
            if length < SHORTEST:
                break
            total = (count - 1) * length + saved[first + count]
            if total > saved[first]:
                saved[first], choices[first] = total, (count, length)
    found = []
    first = 0
    while first < len(common):
        count, length = choices[first]
        if length:
            found.append(SharedPrefix(first, count, length))
        first += count
    return found


def _common_tokens(sample: SequenceSample) -> list[int]:
    """Return the number of initial tokens that each sequence has in common with the next sequence.

    The last tokens of both sequences do not count.
    """
    cu_seqlens, ids = sample.cu_seqlens(TOKENS).long(), sample.tensor(TOKENS)
    lengths = cu_seqlens.diff()
    common = torch.minimum(lengths[:-1], lengths[1:]).sub(1).clamp(min=0)
    one, other = (ranges(starts, common) for starts in (cu_seqlens[:-2], cu_seqlens[1:-1]))
    differ = (ids[one] != ids[other]).nonzero().squeeze(1)
    pairs = torch.arange(common.shape[0]).repeat_interleave(common)[differ]
    within = ranges(torch.zeros_like(common), common)[differ]
    counts: list[int] = common.scatter_reduce(0, pairs, within, "amin").tolist()
    return counts


def shared_microbatches(sample: SequenceSample, max_tokens: int) -> list[list[int]]:
    """Cut a sample on the CPU into micro-batches in which a shared prefix counts once.

    Items that share a prefix stay together as far as ``max_tokens`` allows.
    """
    again = [0] * sum(sample.sequence_counts(TOKENS))
    """Number of tokens that each sequence shares with the previous sequence."""
    for prefix in shared_prefixes(sample):
        again[prefix.first + 1 : prefix.first + prefix.count] = [prefix.length] * (prefix.count - 1)
    groups: list[list[int]] = []
    sizes: list[int] = []
    sequence = 0
    for item, lengths in enumerate(sample.lengths[TOKENS]):
        stop = sequence + len(lengths)
        tokens = sum(lengths) - sum(again[sequence:stop])
        shares = again[sequence] if lengths else 0
        if shares and sizes[-1] + tokens <= max_tokens:
            groups[-1].append(item)
            sizes[-1] += tokens
        else:
            groups.append([item])
            sizes.append(tokens + shares)
        sequence = stop
    parts = best_fit(sizes, max_tokens)
    return [[item for group in part for item in groups[group]] for part in parts]


def _joined(spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return the token indices of spans (first token, number of tokens)."""
    starts, lengths = torch.tensor(spans).unbind(1)
    return ranges(starts, lengths)
