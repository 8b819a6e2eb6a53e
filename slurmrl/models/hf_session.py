"""Generation with a model of transformers and its cache.

Shapes: T packed tokens, S rows, V vocabulary, L blocks with experts, K experts of a token in each.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from slurmrl.errors import UsageError
from slurmrl.models.hf_config import generation_limit
from slurmrl.models.hf_pictures import PictureReader
from slurmrl.models.hf_routers import HFRouters, RecordedReads
from slurmrl.models.packed import packed_positions, packed_rows
from slurmrl.tensors.ops.arguments import upload


class HFSession:
    """A batch of rows that a model extends token by token.

    ``model`` calls ``inner`` with the arguments of a step. A sharded engine's hooks are on
    ``model``. ``lengths`` [S] is the number of tokens in the cache for each row. Prompts are padded
    on the left to the longest prompt, and the padding counts toward ``prefill_tokens``.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: PreTrainedModel,
        lengths: Sequence[int],
        prefill_tokens: int,
        width: int = 0,
        routers: HFRouters | None = None,
        reader: PictureReader | None = None,
        pictures: Sequence[str] = (),
    ) -> None:
        """Begin without tokens. `prompts` pads the prompts to at least ``width`` columns.

        ``routers`` are the model's routers if experts are recorded. ``reader`` belongs to a model
        that reads images. ``pictures`` are the paths of each row's pictures (`tensors.pictures`).
        """
        self._prompts = torch.tensor(lengths, dtype=torch.int64)
        device = next(inner.parameters()).device
        (self.lengths,) = upload([self._prompts], device)
        self._model, self._inner, self._prefill_tokens = model, inner, prefill_tokens
        self._least_width, self._routers = width, routers
        self._reader, self._pictures = reader, pictures
        self._offsets = torch.zeros_like(self.lengths)
        """[S]: position of a row's next token minus the number of its tokens."""
        self._parameters = frozenset(inspect.signature(inner.forward).parameters)
        self._limit = generation_limit(inner.config.to_dict())
        self._begin(len(lengths))

    def _begin(self, rows: int) -> None:
        self._cache = DynamicCache(config=self._inner.config)
        self._mask = self.lengths.new_zeros((rows, 0))
        self._experts: list[Tensor] = []
        """Recorded experts of the cache's columns, for each call [S, columns, L * K] int16."""

    @property
    def width(self) -> int:
        """Number of columns of the cache: a row's tokens and padding."""
        return self._mask.shape[1]

    @property
    def full(self) -> bool:
        """Whether no column may be added. A new session must then prefill with less padding."""
        return self._limit is not None and self.width >= self._limit.tokens

    def prompts(self, input_ids: Tensor) -> Tensor:
        """Prefill the packed prompts [T]. Return the logits [S, V] after each prompt."""
        tokens = input_ids.shape[0]
        longest = max(int(self._prompts.max()), self._least_width)
        cu_seqlens = torch.cat([self._prompts.new_zeros(1), self._prompts.cumsum(0)])
        places = packed_rows(cu_seqlens, tokens)
        columns = packed_positions(cu_seqlens, tokens) + (longest - self._prompts)[places]
        rows, columns = upload((places, columns), input_ids.device)
        ids = input_ids.new_zeros((self.lengths.shape[0], longest))
        ids[rows, columns] = input_ids
        mask = torch.zeros_like(ids)
        mask[rows, columns] = 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        each = max(1, self._prefill_tokens // longest)
        logits: list[Tensor] = []
        caches: list[DynamicCache] = []
        experts: list[Tensor] = []
        for first in range(0, len(ids), each):
            part = slice(first, first + each)
            self._begin(len(ids[part]))
            places, more = self._with_pictures(part, ids[part], mask[part], positions[part])
            logits.append(self._read(ids[part], mask[part], places, more))
            caches.append(self._cache)
            experts += self._experts
        self._cache, self._mask = _joined(caches), mask
        self._experts = [torch.cat(experts)] if experts else []
        return torch.cat(logits)

    def next(self, tokens: Tensor, alive: Tensor) -> Tensor:
        """Process one more token [S] of each row, and return the logits [S, V] after it.

        Rows that are not ``alive`` [S] do not advance, and their logits are undefined.
        """
        if self._reader is not None:
            tokens = self._reader.text_only(tokens)
        places = (self.lengths + self._offsets)[:, None]
        logits = self._read(tokens[:, None], self._mask.new_ones((len(tokens), 1)), places)
        self.lengths = self.lengths + alive
        return logits

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, in this order; a row may occur several times."""
        self.lengths, self._mask = self.lengths[rows], self._mask[rows]
        self._offsets = self._offsets[rows]
        if self._routers is not None:
            self._experts = [torch.cat(self._experts, dim=1)[rows]]
        # `batch_select_indices` is missing or incomplete for convolutions and linear attention.
        self._cache.reorder_cache(cast(torch.LongTensor, rows))

    def join(self, other: HFSession) -> None:
        """Append the rows of a session of equal width. Do not use that session afterwards."""
        assert other.width == self.width, "columns are the same for all rows"
        self.lengths = torch.cat((self.lengths, other.lengths))
        self._offsets = torch.cat((self._offsets, other._offsets))
        self._mask = torch.cat((self._mask, other._mask))
        self._cache = _joined([self._cache, other._cache])
        if self._routers is not None:
            both = [torch.cat(each._experts, dim=1) for each in (self, other)]
            self._experts = [torch.cat(both)]

    def experts(self, row: int, tokens: int) -> Tensor:
        """Return the experts [tokens, L * K] int16 of a row's first ``tokens`` in the cache."""
        self._experts = [torch.cat(self._experts, dim=1)]
        read: Tensor = self._experts[0][row][self._mask[row] > 0]
        return read[:tokens]

    def _with_pictures(
        self, part: slice, ids: Tensor, mask: Tensor, positions: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the positions and the other arguments of a part of the prompts."""
        if self._reader is None:
            return positions, {}
        more = self._reader.arguments(ids, self._reader.load(self._pictures[part], ids.device))
        found = self._reader.positions(more, mask)
        if found is not None:
            positions, self._offsets[part] = found
        return positions, more

    def _read(
        self,
        ids: Tensor,
        mask: Tensor,
        positions: Tensor,
        more: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        self._mask = torch.cat((self._mask, mask), dim=1)
        if self._limit is not None and self.width > self._limit.tokens:
            raise UsageError(f"{type(self._inner).__name__}: {self._limit.reason}")
        arguments = {
            "input_ids": ids,
            "attention_mask": self._mask,
            "position_ids": positions,
            "past_key_values": self._cache,
            "cache_params": self._cache,
            "cache": self._cache,
            "use_cache": True,
            "logits_to_keep": 1,
            **(more or {}),
        }
        if not self._parameters & {"past_key_values", "cache_params", "cache"}:
            name = type(self._inner).__name__
            raise UsageError(f"{name} cannot generate: its forward() takes no cache")
        if "cache_params" in self._parameters and ids.shape[1] == 1:
            del arguments["attention_mask"]  # Mamba would read only the mask's last column.
        step = {name: value for name, value in arguments.items() if name in self._parameters}
        if self._routers is None:
            output = self._model(ids, ids, 0, step)
        else:
            self._routers.routes = recorded = RecordedReads(len(ids), self._routers.blocks)
            try:
                output = self._model(ids, ids, 0, step)
            finally:
                self._routers.routes = None
            self._experts.append(recorded.experts())
        logits: Tensor = output.logits[:, -1]
        return logits


def _joined(caches: Sequence[DynamicCache]) -> DynamicCache:
    """Append the rows of all caches to the first cache and return it; empty the others."""
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        states = [vars(layer) for layer in layers]
        for name in states[0]:
            joined = _joined_values([state[name] for state in states])
            for state in states[1:]:
                state[name] = None  # Free the memory before the next states are joined.
            states[0][name] = joined
    return caches[0]


def _joined_values(values: Sequence[Any]) -> Any:
    """Join tensors with a dim of rows, even in lists and dicts. Keep other values."""
    first = values[0]
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(list(values))
    if isinstance(first, list):
        return [_joined_values(items) for items in zip(*values, strict=True)]
    if isinstance(first, dict):
        return {key: _joined_values([value[key] for value in values]) for key in first}
    return first
