"""Decoding on tensor ranks: each rank caches the keys and values of its own heads, and all ranks
get the same logits. Context ranks all compute the same."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from slurmrl.models.attention import kv_heads
from slurmrl.models.base import DecodeSession
from slurmrl.models.config import ModelConfig
from slurmrl.models.decode_session import CachedSession, UnhookedDecoder
from slurmrl.models.parallel.heads import rows_of
from slurmrl.models.parallel.split import Split
from slurmrl.ops.vocab_parallel import Rows


class SplitSession:
    """Join the logits of all ranks' parts of the vocabulary."""

    def __init__(self, own: CachedSession, rows: Rows, vocabulary: int) -> None:
        self._own, self._rows, self._vocabulary = own, rows, vocabulary

    @property
    def lengths(self) -> Tensor:
        return self._own.lengths

    def prompts(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        return self._rows.whole(self._own.prompts(input_ids, cu_seqlens), self._vocabulary)

    def next(self, tokens: Tensor, alive: Tensor) -> Tensor:
        return self._rows.whole(self._own.next(tokens, alive), self._vocabulary)

    def keep(self, rows: Tensor) -> None:
        self._own.keep(rows)


def split_session(
    decoder: UnhookedDecoder,
    config: ModelConfig,
    lengths: Tensor,
    new_tokens: int,
    head: Tensor,
    split: Split,
) -> DecodeSession:
    """For prompts of ``lengths`` [S]; ``head`` is this rank's part of the vocabulary projection."""
    if split.tensor.size == 1:
        return CachedSession(decoder, config, lengths, new_tokens, head)
    part = replace(config, num_kv_heads=kv_heads(config, split))
    own = CachedSession(decoder, part, lengths, new_tokens, head)
    return SplitSession(own, rows_of(split, config.vocab_size), config.vocab_size)
