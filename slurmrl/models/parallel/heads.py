"""Per-token outputs of whole sequences from hidden states that are spread over ranks.

T packed tokens, N tokens between the blocks of a rank, h hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slurmrl.models.packed import length_order
from slurmrl.models.parallel.split import Split
from slurmrl.tensors.ops.logprobs import following_tokens, logprobs_and_entropy
from slurmrl.tensors.ops.support import Support
from slurmrl.tensors.ops.upload import upload
from slurmrl.tensors.ops.vocab_parallel import Rows, vocab_parallel_logprobs_and_entropy


def split_logprobs(
    split: Split,
    features: Tensor,
    weight: Tensor,
    vocabulary: int,
    input_ids: Tensor,
    cu_seqlens: Tensor,
    temperature: float,
    support: Support | None = None,
) -> tuple[Tensor, Tensor]:
    """log p(x_t | x_<t) and entropies, both [T], 0 at the first token of a sequence, of
    distributions that are restricted to ``support``.

    features [N, h] are in ``length_order``; weight is this rank's part of [V, h]; cu_seqlens
    [S+1] is in host memory. A context rank computes what its own tokens predict.
    """
    tokens = input_ids.shape[0]
    order, cu_sorted = length_order(cu_seqlens, tokens)
    first, last = split.own_range(tokens)
    rest = following_tokens(cu_sorted)
    rest = rest[(rest > first) & (rest <= last)]
    before, places = upload((rest - 1 - first, order[rest]), input_ids.device)
    hidden = split.enter(features).index_select(0, before)
    targets = input_ids[places]
    drawn_from = None if support is None else support.at(places)
    if split.tensor.size > 1:
        rows = rows_of(split, vocabulary)
        parts = vocab_parallel_logprobs_and_entropy(
            hidden, weight, targets, rows, temperature, support=drawn_from
        )
    else:
        parts = logprobs_and_entropy(hidden, weight, targets, temperature, support=drawn_from)
    both = torch.stack(parts)
    whole = both.new_zeros((2, tokens)).index_copy(1, places, both)
    logp, entropy = split.over_context(whole).unbind()
    return logp.clone(), entropy.clone()  # FSDP's hooks of a unit's outputs do not support views


def split_values(split: Split, values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Values [T] of whole sequences, in their order, from those of a rank's tokens [N];
    cu_seqlens [S+1] is in host memory."""
    tokens = int(cu_seqlens[-1])
    order, _ = length_order(cu_seqlens, tokens)
    first, last = split.own_range(tokens)
    own = split.together(values)[: last - first]
    (places,) = upload([order[first:last]], own.device)
    return split.over_context(own.new_zeros(tokens).index_copy(0, places, own))


def rows_of(split: Split, vocabulary: int) -> Rows:
    return Rows(split.tensor.group, -(-vocabulary // split.tensor.size))
