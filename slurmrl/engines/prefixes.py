"""Prefixes that adjacent sequences of a sample share, and its packing without repeated tokens.

T tokens of a sample, N tokens of its pieces, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from slurmrl.data.packing import microbatches
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import TOKENS
from slurmrl.models.packed import ranges
from slurmrl.models.prefixes import Pieces

SHORTEST = 16
"""Tokens of a prefix that is worth the calls that it costs."""
MOST = 64
"""Sequences that share a prefix; if more do, it is read again for further ones."""


@dataclass(frozen=True)
class SharedPrefix:
    """A prefix of adjacent sequences."""

    first: int
    """The first of the sequences."""
    count: int
    length: int


@dataclass(frozen=True)
class SharedTokens:
    """A sample's tokens as pieces of its sequences."""

    taken: Tensor
    """[N]: which token of the sample each token of the pieces is."""
    pieces: Pieces
    places: Tensor
    """[T]: the place of each token of the sample among those of the pieces."""


def shared_tokens(sample: SequenceSample) -> SharedTokens | None:
    """The pieces of a sample on the CPU; None if its sequences share no prefix."""
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
    """The prefixes of at least `SHORTEST` tokens, in order. They leave out the most tokens that
    prefixes of up to `MOST` sequences can; each sequence has at most one, and a token behind it."""
    common = _common_tokens(sample)
    saved = [0] * (len(common) + 2)
    """The most tokens of the sequences from each one on that can be left out."""
    choices = [(1, 0)] * (len(common) + 1)
    """How many sequences from each one on share how long a prefix."""
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
    """How many first tokens each sequence has in common with the next one, its last and the next
    one's last not counted."""
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
    """Cut a sample on the CPU as `microbatches` does. A prefix counts once, and the items that
    share it stay together as far as ``max_tokens`` allows."""
    again = [0] * sum(sample.sequence_counts(TOKENS))
    """The tokens that each sequence shares with the one before it."""
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
    parts = microbatches(sizes, max_tokens)
    return [[item for group in part for item in groups[group]] for part in parts]


def _joined(spans: Sequence[tuple[int, int]]) -> Tensor:
    """The tokens of spans, each a first token and a number of tokens."""
    starts, lengths = torch.tensor(spans).unbind(1)
    return ranges(starts, lengths)
