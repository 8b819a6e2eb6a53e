"""A built-in decoder that reads tokens of many sequences in one call, with a paged key-value cache.

Shapes: T packed tokens, R rows of the tables, N pages of a row, C cells of the cache, K experts per
token, Hq query heads, Hkv key and value heads, D head size, h hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slurmrl.models.decoder import Decoder
from slurmrl.models.experts import Recorded
from slurmrl.models.inference import Apply, Forward, head_product, packs, short_forward
from slurmrl.models.layer_parts import AttentionSpec, Rotation, kv_heads
from slurmrl.models.parallel.linear import rows_of
from slurmrl.tensors.ops.attention import Packing
from slurmrl.tensors.ops.elementwise import rotate
from slurmrl.tensors.ops.native.loading import for_floats
from slurmrl.tensors.ops.paged_kernels import (
    attend_heads,
    paged_attention,
    write_cells,
)
from slurmrl.tensors.ops.products import PackedLayer
from slurmrl.tensors.ops.sink_attention import causal_attention


@dataclass(frozen=True, kw_only=True)
class PagedCall:
    """The cells and rows of the tokens of one call.

    The first tokens are ``fresh``: whole beginnings of sequences, which see no cached tokens.
    Further tokens also see cells of earlier calls.
    """

    slots: Tensor
    """[T] int64: cell of each token's key and value."""
    fresh: Packing
    """Boundaries of the sequences of the fresh tokens."""
    fresh_tokens: int
    tables: Tensor
    """[R, N] int64: pages of each row."""
    rows: Tensor
    """[T - fresh] int64: row of each further token."""
    lengths: Tensor
    """[T - fresh] int64: number of cells that each further token sees, its own included."""
    longest: int
    """Upper bound of ``lengths``."""
    chunk: int = 1
    """Maximum number of further tokens of one row. These tokens are adjacent and in order."""


def cell_bytes(decoder: Decoder) -> int:
    """Return the size in bytes of a token's cell on this rank.

    A cell has the token's keys and values in all layers, and its experts.
    """
    config = decoder.config
    heads, routes = kv_heads(config, decoder.split), sum(expert_numbers(decoder))
    size = decoder.head_weight().element_size()
    return 2 * config.num_layers * heads * config.head_dim * size + 2 * routes


def expert_numbers(decoder: Decoder) -> list[int]:
    """Return the number of experts that process a token, for each block with experts."""
    moe = decoder.config.moe
    return [] if moe is None else [moe.per_token] * len(moe.layers)


class PagedCache:
    """Keys and values of all layers, in pages of ``page`` cells.

    The cache also holds each token's experts if they are recorded. After the pages comes one
    ``spare`` cell, for tokens that belong to no sequence.
    """

    def __init__(self, decoder: Decoder, page: int) -> None:
        """Make an empty cache, in the dtype and on the device of the decoder's head."""
        config, like = decoder.config, decoder.head_weight()
        self.page, self.pages = page, 0
        self._shape = (kv_heads(config, decoder.split), config.head_dim)
        self.layers = [
            (like.new_zeros((0, *self._shape)), like.new_zeros((0, *self._shape)))
            for _ in range(config.num_layers)
        ]
        self._device, self._numbers = like.device, expert_numbers(decoder)
        self.experts: list[Tensor] = []
        """Recorded experts, [C, K] int16 for each block; empty before `record_experts`."""

    @property
    def spare(self) -> int:
        return self.pages * self.page

    def grow(self, pages: int) -> None:
        """Grow to at least this many pages; existing pages keep their content."""
        if pages <= self.pages:
            return
        self.pages = pages
        for layer, (keys, values) in enumerate(self.layers):
            self.layers[layer] = (self._grown(keys), self._grown(values))
        self.experts = [self._grown(slab) for slab in self.experts]

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts to record."""
        return bool(self._numbers)

    def record_experts(self) -> None:
        """Start recording experts. Tokens that are already in the cache get no record."""
        cells = self.spare + 1 if self.pages else 0
        self.experts = [
            torch.zeros((cells, count), dtype=torch.int16, device=self._device)
            for count in self._numbers
        ]

    def _grown(self, slab: Tensor) -> Tensor:
        # New cells must be finite, because attention multiplies masked values by 0.
        grown = slab.new_zeros((self.spare + 1, *slab.shape[1:]))
        grown[: slab.shape[0]] = slab
        return grown

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages; ``sources`` and ``targets`` are page numbers [·] int64."""
        for slabs in (*self.layers, self.experts):
            for slab in slabs:
                pages = slab[: self.spare].view(self.pages, -1)
                pages[targets] = pages[sources]


class PagedCore:
    """Core that stores a call's keys and values, and attends over all stored keys and values."""

    def __init__(self, cache: PagedCache, call: PagedCall) -> None:
        self._cache, self._call = cache, call

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        call, (keys, values) = self._call, self._cache.layers[spec.layer]
        write_cells(keys, values, call.slots, k, v)
        fresh, parts = call.fresh_tokens, []
        if fresh:
            own = (q[:fresh], k[:fresh], v[:fresh])
            parts.append(causal_attention(*own, call.fresh, spec.scale, spec.window, spec.sinks))
        if fresh < q.shape[0]:
            places = (call.tables, call.rows, call.lengths)
            parts.append(paged_attention(q[fresh:], keys, values, *places, **self._sizes(spec)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def of_heads(self, spec: AttentionSpec, heads: Tensor, rotation: Rotation | None) -> Tensor:
        """Return the attention [T, Hq, D] for heads [T, Hq + 2 Hkv, D]."""
        call, (keys, values) = self._call, self._cache.layers[spec.layer]
        if not call.fresh_tokens:
            places = (call.slots, call.tables, call.rows, call.lengths)
            return attend_heads(heads, rotation, keys, values, *places, **self._sizes(spec))
        kv_heads = keys.shape[1]
        q, k, v = heads.split_with_sizes([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        return self(spec, q, k, v)

    def of_layer(
        self, spec: AttentionSpec, layer: PackedLayer, x: Tensor, rotation: Rotation | None
    ) -> Tensor | None:
        """Run one fused layer. Return None for fresh tokens or if only some dims are rotated."""
        call, (keys, values) = self._call, self._cache.layers[spec.layer]
        if call.fresh_tokens or (rotation is not None and rotation[0].shape[-1] < keys.shape[-1]):
            return None
        places = (call.slots, call.tables, call.rows, call.lengths)
        sizes: dict[str, Any] = {"page": self._cache.page, "scale": spec.scale}
        return layer.decode(x, rotation, keys, values, *places, **sizes, window=spec.window)

    def _sizes(self, spec: AttentionSpec) -> dict[str, Any]:
        call = self._call
        return {
            "page": self._cache.page,
            "longest": call.longest,
            "chunk": call.chunk,
            "scale": spec.scale,
            "window": spec.window,
            "sinks": spec.sinks,
        }


class PagedDecoder:
    """A decoder with its cache. The decoder's parameters must keep their addresses."""

    def __init__(self, decoder: Decoder, page: int) -> None:
        self.decoder, self.cache = decoder, PagedCache(decoder, page)
        self._products: tuple[Forward, Apply] | None = None
        self._packed = packs(decoder)

    @property
    def reads_beginnings_apart(self) -> bool:
        """Whether a call computes beginnings of sequences faster if their tokens are ``fresh``.

        On CPUs, the compiled attention over cells is equally fast, and the result of a token
        depends only on its row.
        """
        return for_floats(self.decoder.head_weight()) is None

    @property
    def copies_weights(self) -> bool:
        """Whether calls use copies of the parameters' values. ``renew`` updates the copies."""
        return self._packed

    def renew(self) -> None:
        """Make the next call use the parameters' present values."""
        self._products = None

    def logits(
        self, input_ids: Tensor, positions: Tensor, call: PagedCall, last: Tensor | None
    ) -> Tensor:
        """Return the logits [·, V] after the packed tokens [T] at places ``last`` (None: all).

        The cache gets the keys and values of all packed tokens. Tensor ranks get the same logits.
        """
        decoder = self.decoder
        if self._products is None:
            self._products = short_forward(decoder) or decoder.run_unhooked, head_product(decoder)
        forward, head = self._products
        routes = Recorded(self.cache.experts, call.slots) if self.cache.experts else None
        with decoder.routed(routes):
            hidden = forward(input_ids, positions, PagedCore(self.cache, call))
        logits = head(hidden if last is None else hidden.index_select(0, last))
        if decoder.split.tensor.size == 1:
            return logits
        vocabulary = decoder.config.vocab_size
        return rows_of(decoder.split, vocabulary).whole(logits, vocabulary)
