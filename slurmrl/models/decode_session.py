"""Decoding with a key-value cache by a built-in decoder whose parameters are plain tensors.

Each tensor rank caches the keys and values of its own heads, and all ranks get the same logits.
Context ranks all compute the same.

T packed tokens, S sequences, h hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from slurmrl.data.packing import microbatches
from slurmrl.models.attention import AttentionCore, kv_heads
from slurmrl.models.base import DecodeSession
from slurmrl.models.cache import DecodeCore, KVCache, PrefillCore
from slurmrl.models.config import ModelConfig
from slurmrl.models.packed import inverse, packed_positions
from slurmrl.models.parallel.linear import rows_of
from slurmrl.models.parallel.split import Split
from slurmrl.tensors.ops.arguments import upload
from slurmrl.tensors.ops.attention import Packing
from slurmrl.tensors.ops.logprobs import Rows
from slurmrl.tensors.ops.products import wide_product


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
        lengths: Sequence[int],
        new_tokens: int,
        prefill_tokens: int,
        head: Tensor,
    ) -> None:
        """``head`` is the vocabulary projection [V, h]."""
        self._decoder, self._head = decoder, head
        self._prompts, self._prefill_tokens = lengths, prefill_tokens
        self._cache = KVCache(config, lengths, new_tokens, like=head)

    @property
    def lengths(self) -> Tensor:
        return self._cache.lengths

    def prompts(self, input_ids: Tensor) -> Tensor:
        parts = microbatches(self._prompts, self._prefill_tokens)
        # Equal lengths side by side let attention run in few batched calls.
        parts = [sorted(part, key=self._prompts.__getitem__) for part in parts]
        last = torch.cat([self._prefill(input_ids, part) for part in parts])
        order = torch.tensor([row for part in parts for row in part])
        (back,) = upload([inverse(order)], last.device)
        return wide_product(last[back], self._head.t())

    def _prefill(self, input_ids: Tensor, part: Sequence[int]) -> Tensor:
        """The hidden states [S, h] after the prompts of some rows, which are stored."""
        prompts = torch.tensor(self._prompts)
        begins = prompts.cumsum(0) - prompts
        index = torch.tensor(part)
        ends = prompts[index].cumsum(0)
        cu_seqlens = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
        tokens = int(ends[-1])
        rows = torch.repeat_interleave(index, prompts[index], output_size=tokens)
        places = packed_positions(cu_seqlens, tokens)
        indices = (begins[rows] + places, rows, places, ends - 1)
        taken, rows, places, last = upload(indices, input_ids.device)
        core = PrefillCore(self._cache, Packing(cu_seqlens, int(prompts.max())), rows, places)
        return self._decoder.run_unhooked(input_ids[taken], places, core)[last]

    def next(self, tokens: Tensor, alive: Tensor, longest: int) -> Tensor:
        core = DecodeCore(self._cache, longest)
        hidden = self._decoder.run_unhooked(tokens, self.lengths, core)
        self._cache.lengths = self.lengths + alive
        return wide_product(hidden, self._head.t())

    def keep(self, rows: Tensor) -> None:
        self._cache.keep(rows)


class SplitSession:
    """Join the logits of all ranks' parts of the vocabulary."""

    def __init__(self, own: CachedSession, rows: Rows, vocabulary: int) -> None:
        self._own, self._rows, self._vocabulary = own, rows, vocabulary

    @property
    def lengths(self) -> Tensor:
        return self._own.lengths

    def prompts(self, input_ids: Tensor) -> Tensor:
        return self._rows.whole(self._own.prompts(input_ids), self._vocabulary)

    def next(self, tokens: Tensor, alive: Tensor, longest: int) -> Tensor:
        return self._rows.whole(self._own.next(tokens, alive, longest), self._vocabulary)

    def keep(self, rows: Tensor) -> None:
        self._own.keep(rows)


def decode_session(
    decoder: UnhookedDecoder,
    config: ModelConfig,
    lengths: Sequence[int],
    new_tokens: int,
    prefill_tokens: int,
    head: Tensor,
    split: Split,
) -> DecodeSession:
    """For prompts of ``lengths``; ``head`` is this rank's part of the vocabulary projection."""
    part = replace(config, num_kv_heads=kv_heads(config, split))
    own = CachedSession(decoder, part, lengths, new_tokens, prefill_tokens, head)
    if split.tensor.size == 1:
        return own
    return SplitSession(own, rows_of(split, config.vocab_size), config.vocab_size)
