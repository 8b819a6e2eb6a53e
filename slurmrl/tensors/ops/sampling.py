"""Sampling: counter-based uniform numbers, one token per row of logits, and sampling masks.

A sampling mask is the set of tokens that generation could sample.

Shapes: S rows, T tokens, t tokens of a chunk, V vocabulary, N token ids of all masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from slurmrl.tensors.ops.arguments import wide
from slurmrl.tensors.ops.splitmix import mix, shift, start

RESOLUTION = 2**40
"""Resolution of probabilities, which are rounded to multiples of 1 / RESOLUTION."""
NONE = -1
"""Padding of rows of token ids."""


OUTSIDE = -1e30
"""Logit, divided by the temperature, of a token outside a mask. The token's probability is 0. The
logit is finite, so that products with it are finite."""


class Sampled(NamedTuple):
    """One token of each row; K is the ``top_k`` with which it was sampled."""

    tokens: Tensor
    """[S] int64: sampled tokens."""
    logprobs: Tensor
    """[S]: log-probabilities of the tokens."""
    masks: Tensor | None = None
    """[S, K] int32: tokens that ``top_k`` and ``top_p`` kept, ascending, after padding by `NONE`.
    None if the tokens are not recorded."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Sampled:
        """Return a copy with ``change`` applied to every tensor."""
        masks = None if self.masks is None else change(self.masks)
        return Sampled(change(self.tokens), change(self.logprobs), masks)


def stream(seed: int, step: int, key: int) -> int:
    """Return the number of the random stream of (seed, step, key), for `stream_uniform`."""
    return key ^ start(seed, step)


def stream_uniform(streams: Tensor, position: Tensor | int) -> Tensor:
    """Return uniform numbers in [0, 1), [S] float64, pure functions of stream and position.

    streams [S] int64 come from `stream`; position is one number or [S]. A row's number does not
    depend on the other rows of the batch, on their order, or on the device.
    """
    bits = shift(mix(mix(streams) ^ position), 11)
    return bits.to(torch.float64) * 2.0**-53


def sample(
    logits: Tensor,
    uniforms: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    greedy: bool = False,
    banned: Tensor | None = None,
    masked: bool = False,
    record: bool = False,
) -> Sampled:
    """Sample a token per row, by the inverse of the cumulative distribution at ``uniforms`` [S].

    logits [S, V]. ``top_k`` and ``top_p`` restrict sampling, and tokens in ``banned`` are never
    sampled. Among equally likely tokens, lower ids come first.

    Log-probabilities belong to the full distribution softmax(logits / temperature); with
    ``masked``, to the distribution over the tokens that ``top_k`` and ``top_p`` keep.
    Log-probabilities are float64 for float64 logits, else float32. With ``record`` and ``top_k``,
    the result has the kept tokens.
    """
    scaled = logits.to(wide(logits.dtype)) / temperature
    allowed, whole = _ban(scaled, banned), scaled
    kept = None
    if greedy:
        tokens = allowed.argmax(-1)
    else:
        allowed = _restrict(allowed, top_k, top_p)
        tokens = _draw(allowed, uniforms)
        if masked and (top_k is not None or top_p < 1.0):
            whole = allowed
        if record and top_k is not None:
            kept = _kept(allowed, top_k)
    chosen = scaled.gather(-1, tokens[:, None]).squeeze(-1)
    return Sampled(tokens, chosen - whole.logsumexp(-1), kept)


def joined(parts: Sequence[Sampled]) -> Sampled:
    """Return the concatenated samples of several calls."""
    tokens = torch.cat([part.tokens for part in parts])
    logprobs = torch.cat([part.logprobs for part in parts])
    if all(part.masks is None for part in parts):
        return Sampled(tokens, logprobs)
    masks = [
        part.tokens.new_empty((len(part.tokens), 0), dtype=torch.int32)
        if part.masks is None
        else part.masks
        for part in parts
    ]
    width = max(each.shape[1] for each in masks)
    return Sampled(tokens, logprobs, torch.cat([_widened(each, width) for each in masks]))


def _widened(masks: Tensor, width: int) -> Tensor:
    missing = width - masks.shape[1]
    return torch.nn.functional.pad(masks, (missing, 0), value=NONE) if missing else masks


def _ban(scaled: Tensor, banned: Tensor | None) -> Tensor:
    return scaled if banned is None else scaled.index_fill(-1, banned, float("-inf"))


def _restrict(scaled: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Set logits to minus infinity outside the top k tokens and the smallest set of mass p."""
    if top_k is not None and top_k < scaled.shape[-1]:
        least = scaled.topk(top_k, dim=-1).values[:, -1:]
        ties, above = scaled == least, scaled > least
        left = top_k - above.sum(-1, keepdim=True)
        kept = above | (ties & (ties.cumsum(-1, dtype=torch.int32) <= left))
        scaled = scaled.masked_fill(~kept, float("-inf"))
    if top_p < 1.0:
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        weights = _weights(ordered)
        before = weights.cumsum(-1) - weights
        ordered = ordered.masked_fill(before >= top_p * RESOLUTION, float("-inf"))
        scaled = torch.empty_like(scaled).scatter_(-1, order, ordered)
    return scaled


def _kept(allowed: Tensor, top_k: int) -> Tensor:
    """Return the tokens [S, top_k] int32 whose logits are not minus infinity (`Sampled.masks`).

    No row has more than ``top_k`` such tokens.
    """
    values, ids = allowed.topk(min(top_k, allowed.shape[-1]), dim=-1)
    kept = ids.masked_fill(values == float("-inf"), NONE).sort(-1).values.to(torch.int32)
    return _widened(kept, top_k)


def _draw(scaled: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first token [S] whose cumulative probability exceeds the row's number."""
    cumulative = _weights(scaled).cumsum(-1)
    target = (uniforms[:, None] * cumulative[:, -1:]).floor().long()
    tokens: Tensor = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return tokens.clamp_(max=scaled.shape[-1] - 1)  # NaN logits would give an invalid index.


def _weights(scaled: Tensor) -> Tensor:
    """Return probabilities in units of 1 / RESOLUTION, int64. Sums on any device are exact."""
    return scaled.double().softmax(-1).mul_(RESOLUTION).round_().long()


@dataclass(frozen=True, eq=False)
class SamplingMasks:
    """The sampling masks of T tokens."""

    restricted: Tensor
    """[T] bool: whether a token has a mask; False means the whole vocabulary."""
    sizes: Tensor
    """[T] int64: number of token ids of each mask on this rank."""
    ids: Tensor
    """[N] int64: token ids of all masks, concatenated."""

    @staticmethod
    def of(sizes: Tensor, ids: Tensor) -> SamplingMasks:
        """Return masks from sizes [T] and token ids [N]; a size of 0 means the whole vocabulary."""
        return SamplingMasks(sizes > 0, sizes.long(), ids.long())

    def at(self, places: Tensor) -> SamplingMasks:
        """Return the masks of the tokens at distinct ``places``."""
        sizes, starts = self.sizes[places], (self.sizes.cumsum(0) - self.sizes)[places]
        offsets = torch.repeat_interleave(starts - (sizes.cumsum(0) - sizes), sizes)
        index = offsets + torch.arange(offsets.shape[0], device=offsets.device)
        return SamplingMasks(self.restricted[places], sizes, self.ids[index])

    def padded(self, tokens: int) -> SamplingMasks:
        """Append ``tokens`` tokens with the whole vocabulary to the masks."""
        more = self.sizes.new_zeros(tokens)
        return SamplingMasks(
            torch.cat((self.restricted, more > 0)), torch.cat((self.sizes, more)), self.ids
        )

    def within(self, first: int, rows: int) -> SamplingMasks:
        """Return the masks with only the ids first..first+rows-1, renumbered as 0..rows-1."""
        tokens = torch.arange(self.sizes.shape[0], device=self.sizes.device)
        inside = (self.ids >= first) & (self.ids < first + rows)
        holders = torch.repeat_interleave(tokens, self.sizes)[inside]
        sizes = torch.zeros_like(self.sizes).index_add_(0, holders, torch.ones_like(holders))
        return SamplingMasks(self.restricted, sizes, self.ids[inside] - first)

    def restrict_(self, logits: Tensor, first: int, temperature: float) -> Tensor:
        """Set the logits [t, V] of tokens first..first+t-1 to `OUTSIDE` outside of the masks."""
        count = logits.shape[0]
        begin, end = self._ends[first], self._ends[first + count]
        rows = torch.repeat_interleave(
            torch.arange(count, device=logits.device),
            self.sizes[first : first + count],
            output_size=end - begin,
        )
        inside = (rows, self.ids[begin:end])
        kept = logits[inside]
        logits.masked_fill_(self.restricted[first : first + count, None], OUTSIDE * temperature)
        return logits.index_put_(inside, kept)

    @cached_property
    def _ends(self) -> list[int]:
        return [0, *accumulate(self.sizes.tolist())]
