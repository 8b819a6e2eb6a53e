"""A built-in decoder that reads tokens of many sequences in one call, with a paged key-value cache.

T packed tokens, Q sequences of a call, R rows of the tables, N pages of a row, C cells of the
cache, Hkv key and value heads, D head size, h hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slurmrl.models.attention import AttentionSpec, kv_heads
from slurmrl.models.decoder import Decoder
from slurmrl.models.inference import short_forward
from slurmrl.models.parallel.heads import rows_of
from slurmrl.ops.attention import Packing, packed_attention
from slurmrl.ops.paged_attention import paged_attention
from slurmrl.ops.products import wide_product


@dataclass(frozen=True, kw_only=True)
class PagedCall:
    """Where the tokens of one call belong. First come whole beginnings of sequences, the ``fresh``
    tokens, which see each other only; then tokens that also see cells of earlier calls."""

    slots: Tensor
    """[T] int64: the cell of each token's key and value."""
    fresh: Packing
    """The sequences of the fresh tokens."""
    fresh_tokens: int
    tables: Tensor
    """[R, N] int64: the pages of each row."""
    rows: Tensor
    """[T - fresh] int64: the row of each further token."""
    lengths: Tensor
    """[T - fresh] int64: the cells that each sees, its own included."""
    longest: int
    """Upper bound of ``lengths``."""


def cell_bytes(decoder: Decoder) -> int:
    """Bytes of a token's keys and values in all layers of this rank's part of a decoder."""
    config = decoder.config
    heads = kv_heads(config, decoder.split)
    return 2 * config.num_layers * heads * config.head_dim * decoder.head_weight().element_size()


class PagedCache:
    """Keys and values of all layers, in pages of ``page`` cells."""

    def __init__(self, decoder: Decoder, page: int) -> None:
        """Empty, in the dtype and on the device of the decoder's head."""
        config, like = decoder.config, decoder.head_weight()
        self.page, self.pages = page, 0
        self._shape = (kv_heads(config, decoder.split), config.head_dim)
        self.layers = [
            (like.new_zeros((0, *self._shape)), like.new_zeros((0, *self._shape)))
            for _ in range(config.num_layers)
        ]

    def grow(self, pages: int) -> None:
        """Have at least this many pages; their content stays."""
        if pages <= self.pages:
            return
        self.pages = pages
        for layer, (keys, values) in enumerate(self.layers):
            self.layers[layer] = (self._grown(keys), self._grown(values))

    def _grown(self, slab: Tensor) -> Tensor:
        # Zeros: what is masked is still multiplied by 0.
        grown = slab.new_zeros((self.pages * self.page, *self._shape))
        grown[: slab.shape[0]] = slab
        return grown

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages, by their numbers [·] int64."""
        for slabs in self.layers:
            for slab in slabs:
                pages = slab.view(self.pages, -1)
                pages[targets] = pages[sources]


class PagedCore:
    """Stores the keys and values of a call's tokens, and attends over them and earlier ones."""

    def __init__(self, cache: PagedCache, call: PagedCall) -> None:
        self._cache, self._call = cache, call

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        call, (keys, values) = self._call, self._cache.layers[spec.layer]
        keys.index_copy_(0, call.slots, k)
        values.index_copy_(0, call.slots, v)
        fresh, parts = call.fresh_tokens, []
        if fresh:
            own = (q[:fresh], k[:fresh], v[:fresh])
            parts.append(packed_attention(*own, call.fresh, spec.scale, spec.window))
        if fresh < q.shape[0]:
            parts.append(
                paged_attention(
                    *(q[fresh:], keys, values, call.tables, call.rows, call.lengths),
                    page=self._cache.page,
                    longest=call.longest,
                    scale=spec.scale,
                    window=spec.window,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class PagedDecoder:
    """A decoder with its cache. The decoder's parameters keep their place in memory meanwhile."""

    def __init__(self, decoder: Decoder, page: int) -> None:
        self.decoder, self.cache = decoder, PagedCache(decoder, page)
        self._forward = short_forward(decoder) or decoder.run_unhooked

    def logits(self, input_ids: Tensor, positions: Tensor, call: PagedCall, last: Tensor) -> Tensor:
        """The logits [·, V] after the tokens at places ``last`` of the packed tokens [T], of which
        the cache gets the keys and values. Tensor ranks get the same logits."""
        decoder = self.decoder
        hidden = self._forward(input_ids, positions, PagedCore(self.cache, call))
        logits = wide_product(hidden.index_select(0, last), decoder.head_weight().t())
        if decoder.split.tensor.size == 1:
            return logits
        vocabulary = decoder.config.vocab_size
        return rows_of(decoder.split, vocabulary).whole(logits, vocabulary)
