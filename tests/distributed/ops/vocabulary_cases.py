"""Functions that ranks run in the test of output layers whose vocabulary they share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.tensors.ops.logprobs import Rows, vocab_parallel_logprobs_and_entropy
from tests.support.largest_tensor import LargestTensor


@dataclass(frozen=True)
class Case:
    """Inputs of a test.

    All ranks make the same inputs and use their own rows of the projection [V, h].
    """

    tokens: int = 50
    hidden: int = 12
    vocabulary: int = 31
    temperature: float = 1.0
    chunk: int | None = None
    dtype: torch.dtype = torch.float32

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """hidden [T, h], weight [V, h], targets [T], weights [2, T] of both results."""
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(self.tokens, self.hidden, generator=generator)
        weight = torch.randn(self.vocabulary, self.hidden, generator=generator)
        targets = torch.randint(0, self.vocabulary, (self.tokens,), generator=generator)
        mix = torch.randn(2, self.tokens, generator=generator)
        return hidden.to(self.dtype), weight.to(self.dtype), targets, mix


@dataclass(frozen=True)
class Found:
    logp: Tensor
    entropy: Tensor
    hidden_gradient: Tensor
    """Partial."""
    weight_gradient: Tensor
    """Of this rank's rows."""
    largest: int
    """Elements of the largest tensor that was made on the way."""


def compute(case: Case) -> Found:
    hidden, weight, targets, mix = case.inputs()
    group = dist.group.WORLD
    assert group is not None
    rows = Rows(group, -(-case.vocabulary // group.size()))
    own = weight[rows.first : rows.first + rows.each].clone()
    hidden.requires_grad_()
    own.requires_grad_()
    with LargestTensor() as largest:
        logp, entropy = vocab_parallel_logprobs_and_entropy(
            hidden, own, targets, rows, case.temperature, case.chunk
        )
        ((logp * mix[0]).sum() + (entropy * mix[1]).sum()).backward()
    assert hidden.grad is not None
    assert own.grad is not None
    return Found(logp.detach(), entropy.detach(), hidden.grad, own.grad, largest.elements)
