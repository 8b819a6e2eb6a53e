"""Positions of the response tokens in packed sequences, and of the states around them.

T packed tokens, S sequences, R response tokens. A sequence is a prompt of at least one token
followed by its response, which may be in several turns with tokens of others between them. Those
are part of the states, not of the response: the step from the last token of a turn leads to the
state before the first token of the next. The state before token t consists of the tokens up to
t - 1, so its value is at position t - 1 of the critic's aligned values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slurmrl.tensors.ops.upload import upload


@dataclass(frozen=True)
class Responses:
    tokens: Tensor
    """[R] positions of the response tokens among the T."""
    states: Tensor
    """[R+S] positions of the states: for each sequence those before its response tokens, then the
    one after its last token."""
    sequence: Tensor
    """[R] number of the sequence of each response token."""
    cu_seqlens: Tensor
    """[S+1] cumulative numbers of response tokens."""
    last: Tensor
    """[S'] positions among the R of the last response tokens of sequences that have any."""
    answered: Tensor
    """[S'] numbers of these sequences."""

    def sums(self, x: Tensor) -> Tensor:
        """[S]: the sum of x [R] over each sequence."""
        return x.new_zeros(len(self.cu_seqlens) - 1).index_add(0, self.sequence, x)


def find_responses(prompt_mask: Tensor, cu_seqlens: Tensor) -> Responses:
    """``prompt_mask`` bool [T], True on tokens that the policy has read, not written: prompts, and
    messages between turns; ``cu_seqlens`` [S+1] over the T tokens, in host memory. The indices
    are made there, and the host waits once for the mask."""
    tokens = (~prompt_mask.cpu()).nonzero().squeeze(1)
    ends = cu_seqlens[1:].long()
    sequence = torch.bucketize(tokens, ends, right=True)
    counts = torch.bincount(sequence, minlength=len(ends))
    cu_responses = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    states = tokens.new_empty(len(tokens) + len(ends))
    order = torch.arange(len(tokens))
    states[order + sequence] = tokens - 1
    behind = cu_responses[1:] + torch.arange(len(ends))
    states[behind] = ends - 1
    answered = counts.nonzero().squeeze(1)
    indices = (tokens, states, sequence, cu_responses, cu_responses[1:][answered] - 1, answered)
    return Responses(*upload(indices, prompt_mask.device))
