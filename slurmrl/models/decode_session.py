"""Decoding with a key-value cache by a built-in decoder whose parameters are plain tensors.

T packed tokens, S sequences, h hidden size, V vocabulary."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from slurmrl.models.attention import AttentionCore
from slurmrl.models.cache import DecodeCore, KVCache, PrefillCore
from slurmrl.models.config import ModelConfig
from slurmrl.models.packed import length_order, packed_positions, packed_rows
from slurmrl.ops.attention import Packing


class UnhookedDecoder(Protocol):
    def run_unhooked(self, input_ids: Tensor, positions: Tensor, core: AttentionCore) -> Tensor:
        """Hidden states [T, h] of tokens [T] at positions [T]."""
        ...


class CachedSession:
    """The ``DecodeSession`` of the built-in decoders."""

    def __init__(
        self,
        decoder: UnhookedDecoder,
        config: ModelConfig,
        lengths: Tensor,
        new_tokens: int,
        head: Tensor,
    ) -> None:
        """``head`` is the vocabulary projection [V, h]."""
        self._decoder, self._head = decoder, head
        self._cache = KVCache(config, lengths, new_tokens, like=head)

    @property
    def lengths(self) -> Tensor:
        return self._cache.lengths

    def prompts(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        tokens = input_ids.shape[0]
        order, cu_sorted = length_order(cu_seqlens, tokens)
        positions = packed_positions(cu_sorted, tokens)
        packing = Packing(cu_sorted.cpu(), int(self.lengths.max()))
        rows = packed_rows(cu_seqlens, tokens)[order]
        core = PrefillCore(self._cache, packing, rows, positions)
        hidden = self._decoder.run_unhooked(input_ids[order], positions, core)
        return hidden[order.argsort()[cu_seqlens[1:].long() - 1]] @ self._head.t()

    def next(self, tokens: Tensor, alive: Tensor) -> Tensor:
        core = DecodeCore(self._cache)
        hidden = self._decoder.run_unhooked(tokens, self.lengths, core)
        self._cache.lengths = self.lengths + alive
        return hidden @ self._head.t()

    def keep(self, rows: Tensor) -> None:
        self._cache.keep(rows)
