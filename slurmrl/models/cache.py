"""The key-value cache of generation, one slab per layer.

S rows, Hkv key and value heads, M capacity in tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slurmrl.models.attention import AttentionSpec
from slurmrl.models.config import ModelConfig
from slurmrl.tensors.ops.arguments import upload
from slurmrl.tensors.ops.attention import Packing, cache_bias, cached_attention, packed_attention

FIRST_ROOM_TOKENS = 32
"""Initial room for new tokens: most rows end long before their limit."""
GROWTH = 1.5
"""Factor on the capacity when a row outgrows it."""
MULTIPLE = 8
"""Attention reads a multiple of this many keys: its kernels copy biases of other lengths."""


class KVCache:
    """Rows of different lengths. ``lengths`` [S] is how many tokens of each row are stored."""

    def __init__(
        self, config: ModelConfig, lengths: Sequence[int], new_tokens: int, *, like: Tensor
    ) -> None:
        """For prompts of ``lengths`` and up to ``new_tokens`` more, in the dtype of ``like``."""
        (self.lengths,) = upload([torch.tensor(lengths, dtype=torch.int64)], like.device)
        self._limit = _multiple(max(lengths) + new_tokens)
        self.capacity = _multiple(max(lengths) + min(new_tokens, FIRST_ROOM_TOKENS))
        shape = (len(lengths), config.num_kv_heads, self.capacity, config.head_dim)
        layers = range(config.num_layers)
        self.slabs = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in layers]

    def reserve(self, tokens: int) -> None:
        """Make room for rows of this many tokens."""
        if tokens <= self.capacity:
            return
        grown = min(int(self.capacity * GROWTH), self._limit)
        self.capacity = _multiple(max(tokens, grown))
        for layer, (keys, values) in enumerate(self.slabs):
            self.slabs[layer] = (self._grown(keys), self._grown(values))

    def _grown(self, slab: Tensor) -> Tensor:
        rows, heads, stored, size = slab.shape
        grown = slab.new_zeros((rows, heads, self.capacity, size))
        grown[:, :, :stored] = slab
        return grown

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows; a row may occur several times."""
        self.lengths = self.lengths[rows]
        for layer, (keys, values) in enumerate(self.slabs):
            self.slabs[layer] = (keys[rows], values[rows])


class PrefillCore:
    """Attention over packed prompts; stores their keys and values."""

    def __init__(self, cache: KVCache, packing: Packing, rows: Tensor, positions: Tensor) -> None:
        """rows and positions [T]: the place of each packed token in the cache."""
        self._cache, self._packing = cache, packing
        self._rows, self._positions = rows, positions

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._cache.slabs[spec.layer]
        keys[self._rows, :, self._positions] = k
        values[self._rows, :, self._positions] = v
        return packed_attention(q, k, v, self._packing, spec.scale, spec.window)


class DecodeCore:
    """Attention of one new token per row; its key and value are stored first."""

    def __init__(self, cache: KVCache, longest: int) -> None:
        """``longest`` is an upper bound of the tokens of a row, the new one included."""
        cache.reserve(longest)
        self._cache, self._keys = cache, _multiple(longest)
        self._rows = torch.arange(cache.lengths.shape[0], device=cache.lengths.device)
        self._biases: dict[int | None, Tensor] = {}

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._cache.slabs[spec.layer]
        keys[self._rows, :, self._cache.lengths] = k
        values[self._rows, :, self._cache.lengths] = v
        seen = slice(0, self._keys)
        bias = self._bias(spec.window, q.dtype)
        return cached_attention(q, keys[:, :, seen], values[:, :, seen], bias, spec.scale)

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Shared by all layers with the same window."""
        if window not in self._biases:
            lengths = self._cache.lengths + 1
            self._biases[window] = cache_bias(lengths, self._keys, window, dtype)
        return self._biases[window]


def _multiple(tokens: int) -> int:
    return -(-tokens // MULTIPLE) * MULTIPLE
