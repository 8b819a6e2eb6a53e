"""Modules that hold a tensor rank's part of their parameters, with the names of whole parameters.

A matrix that is split by rows is a ``Linear`` after ``Split.enter``. Functions compute per-token
outputs of whole sequences from hidden states that are spread over ranks.

Shapes: T packed tokens, S sequences, N tokens of a rank between the blocks, h hidden size, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from slurmrl.models.packed import predictions
from slurmrl.models.parallel.split import Split
from slurmrl.tensors.ops.arguments import upload
from slurmrl.tensors.ops.logprobs import (
    Rows,
    logprobs_and_entropy,
    vocab_parallel_logprobs_and_entropy,
)
from slurmrl.tensors.ops.products import linear
from slurmrl.tensors.ops.sampling import SamplingMasks

LogProbs = tuple[Tensor, Tensor]
"""Log-probabilities and entropies, each [T]."""


class Adapter(Protocol):
    """Additions to the outputs of a decoder's linear layers."""

    def arrange(self, order: Tensor, split: Split) -> None:
        """Prepare for this rank's tokens. ``order`` [T]: the sample index of each packed token."""
        ...

    def product(self, layer: Linear, x: Tensor) -> Tensor | None:
        """Return this rank's addition [T, outputs] for x [T, inputs]; None for no addition."""
        ...


class Linear(nn.Linear):
    """A linear layer that may have an adapter."""

    adapter: Adapter | None = None
    first = 0
    """Column of the whole matrix to which this rank's first input belongs."""

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(linear(x, self.weight, self.bias), x)

    def adapted(self, products: Tensor, x: Tensor) -> Tensor:
        """Return ``products`` (of the weight and x) plus the adapter's addition for x."""
        more = None if self.adapter is None else self.adapter.product(self, x)
        return products if more is None else products + more


class RowLinear(Linear):
    """A linear layer that is split by input columns.

    The products of the ranks are summed. The bias is added once, after the sum.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, split: Split) -> None:
        """Make uninitialized parameters; ``inputs`` is the number of this rank's columns."""
        super().__init__(inputs, outputs, bias=bias)
        self.split = split
        self.first = split.tensor.rank * inputs

    def forward(self, x: Tensor) -> Tensor:
        if self.split.tensor.size == 1:
            return super().forward(x)
        return self.whole(self.adapted(linear(x, self.weight), x))

    def whole(self, products: Tensor) -> Tensor:
        """Return the layer's output from this rank's products of inputs and weight."""
        out = self.split.leave(products)
        return out if self.bias is None else out + self.bias


class VocabProjection(nn.Linear):
    """The vocabulary projection, split by rows.

    ``forward`` passes the weight to a function, because logits are never stored. A sharded engine
    gathers the weight for the call of the module.
    """

    def __init__(self, hidden: int, vocabulary: int, split: Split) -> None:
        first, last = vocabulary_rows(vocabulary, split)
        super().__init__(hidden, last - first, bias=False)

    def forward(  # type: ignore[override]
        self, x: Tensor, use: Callable[[Tensor, Tensor], LogProbs]
    ) -> LogProbs:
        """Return ``use(x, weight)``."""
        return use(x, self.weight)


class VocabEmbedding(nn.Embedding):
    """An embedding split by rows, in ceil-chunks."""

    def __init__(self, vocabulary: int, hidden: int, split: Split) -> None:
        first, last = vocabulary_rows(vocabulary, split)
        super().__init__(last - first, hidden)
        self.first, self.split = first, split

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map ids [T] to embeddings [T, h]; with sequence parallelism, only for this rank's ids."""
        if self.split.tensor.size == 1:
            return super().forward(input_ids)
        row = input_ids - self.first
        here = (row >= 0) & (row < self.num_embeddings)
        return self.split.leave(super().forward(row * here) * here.unsqueeze(-1))


def vocabulary_rows(vocabulary: int, split: Split) -> tuple[int, int]:
    """Return the first row of this tensor rank and the row after its last row."""
    each = -(-vocabulary // split.tensor.size)
    first = min(split.tensor.rank * each, vocabulary)
    return first, min(first + each, vocabulary)


def split_logprobs(
    split: Split,
    features: Tensor,
    weight: Tensor,
    vocabulary: int,
    input_ids: Tensor,
    cu_seqlens: Tensor,
    temperature: float,
    masks: SamplingMasks | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log p(x_t | x_<t) and entropies, both [T], 0 at the first token of a sequence.

    The distributions are restricted to ``masks``. ``features`` [N, h] are in the order of
    `Split.packed`, ``weight`` is this rank's part of [V, h], and ``cu_seqlens`` [S+1] is in host
    memory. A context rank computes the predictions of its tokens.
    """
    tokens = input_ids.shape[0]
    order, places, cu_sorted = split.packed(cu_seqlens, tokens)
    first, last = split.own_range(tokens)
    before, following = predictions(cu_sorted, places, first, last)
    before, places = upload((before, order[following]), input_ids.device)
    hidden = split.enter(features).index_select(0, before)
    targets = input_ids[places]
    drawn_from = None if masks is None else masks.at(places)
    if split.tensor.size > 1:
        rows = rows_of(split, vocabulary)
        parts = vocab_parallel_logprobs_and_entropy(
            hidden, weight, targets, rows, temperature, masks=drawn_from
        )
    else:
        parts = logprobs_and_entropy(hidden, weight, targets, temperature, masks=drawn_from)
    both = torch.stack(parts)
    whole = both.new_zeros((2, tokens)).index_copy(1, places, both)
    logp, entropy = split.over_context(whole).unbind()
    return logp.clone(), entropy.clone()  # FSDP's hooks on a unit's outputs do not support views.


def split_values(split: Split, values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the values [T] of whole sequences, in their order, from a rank's ``values`` [N].

    ``cu_seqlens`` [S+1] is in host memory.
    """
    tokens = int(cu_seqlens[-1])
    order, _, _ = split.packed(cu_seqlens, tokens)
    first, last = split.own_range(tokens)
    own = split.together(values)[: last - first]
    (places,) = upload([order[first:last]], own.device)
    return split.over_context(own.new_zeros(tokens).index_copy(0, places, own))


def rows_of(split: Split, vocabulary: int) -> Rows:
    return Rows(split.tensor.group, -(-vocabulary // split.tensor.size))
