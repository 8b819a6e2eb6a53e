from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from slurmrl.tensors.ops.collectives import Group
from slurmrl.tensors.ops.logprobs import (
    Rows,
    logprobs_and_entropy,
    packed_logprobs_and_entropy,
    packed_logprobs_of_logits,
    vocab_parallel_logprobs_and_entropy,
)
from slurmrl.tensors.ops.sampling import SamplingMasks

TOKENS, HIDDEN, VOCABULARY = 37, 12, 301
CU_SEQLENS = torch.tensor([0, 9, 10, 37], dtype=torch.int32)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, SamplingMasks]:
    """Return inputs in which every third token was sampled from all tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    firsts = CU_SEQLENS[:-1].tolist()
    rows = [
        []
        if token % 3 == 0 or token in firsts
        else sorted(torch.randperm(VOCABULARY, generator=generator)[: 1 + token].tolist())
        for token in range(TOKENS)
    ]
    targets = torch.tensor([row[len(row) // 2] if row else 7 for row in rows])
    sizes = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    ids = torch.tensor([number for row in rows for number in row], dtype=torch.int32)
    return hidden.to(dtype), weight.to(dtype), targets, SamplingMasks.of(sizes, ids)


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, masks: SamplingMasks, temperature: float
) -> tuple[Tensor, Tensor]:
    """Compute the results token by token, only from the logits of the mask."""
    results = []
    rows = masks.ids.split(masks.sizes.tolist())
    for state, target, row in zip(hidden, targets, rows, strict=True):
        kept = row if len(row) else torch.arange(VOCABULARY)
        logq = (weight[kept] @ state / temperature).log_softmax(-1)
        logp = logq[(kept == target).nonzero().squeeze()]
        results.append(torch.stack([logp, -(logq.exp() * logq).sum()]))
    logps, entropies = torch.stack(results).unbind(1)
    return logps, entropies


def assert_close(ours: Tensor | None, expected: Tensor | None) -> None:
    assert ours is not None
    assert expected is not None
    assert (ours - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
@pytest.mark.parametrize("chunk", [None, 5])
def test_masked_logprobs_equal_the_restricted_distribution(
    temperature: float, chunk: int | None
) -> None:
    hidden, weight, targets, masks = inputs()
    mix = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(1))
    results = []
    for exact in (False, True):
        h, w = (x.double() if exact else x.clone() for x in (hidden, weight))
        h.requires_grad_()
        w.requires_grad_()
        logp, entropy = (
            reference(h, w, targets, masks, temperature)
            if exact
            else logprobs_and_entropy(h, w, targets, temperature, chunk, masks)
        )
        ((logp * mix[0]).sum() + (entropy * mix[1]).sum()).backward()
        results.append((logp.detach(), entropy.detach(), h.grad, w.grad))
    for ours, expected in zip(*results, strict=True):
        assert_close(ours, expected)


def test_packed_sequences_keep_the_mask_of_each_token() -> None:
    """The mask does not belong to the previous token. Covers hidden states and logits."""
    hidden, weight, targets, masks = inputs()
    rest = [token for token in range(TOKENS) if token not in CU_SEQLENS[:-1].tolist()]
    before = torch.tensor(rest) - 1
    own = masks.at(torch.tensor(rest))
    expected = reference(hidden[before], weight, targets[rest], own, 0.8)
    packed = (targets, CU_SEQLENS, 0.8)
    found = packed_logprobs_and_entropy(hidden, weight, *packed, masks=masks)
    of_logits = packed_logprobs_of_logits(hidden @ weight.T, *packed, masks)
    for made in (found, of_logits):
        for ours, wanted in zip(made, expected, strict=True):
            assert_close(ours[rest], wanted)
            assert ours[CU_SEQLENS[:-1].long()].eq(0).all()


class _Ranks:
    """A process group in one process, whose gathered values the test provides."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank


def test_vocabulary_parallel_ranks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if a rank has no token of a mask."""
    hidden, weight, targets, masks = inputs()
    each = -(-VOCABULARY // 4)
    parts = weight.split(each)
    sent: dict[int, Tensor] = {}

    def keep(rank: int, values: Tensor) -> Tensor:
        sent[rank] = values.detach()
        return torch.cat([sent.get(r, values) for r in range(len(parts))])

    mix = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(1))
    grads: dict[int, tuple[Tensor, Tensor]] = {}
    for _ in range(2):  # the second time, all ranks' statistics are known
        for rank, part in enumerate(parts):
            monkeypatch.setattr(
                "slurmrl.tensors.ops.logprobs.gathered",
                lambda values, group: keep(group.rank(), values),
            )
            rows = Rows(cast(Group, _Ranks(rank)), each)
            h, w = hidden.clone().requires_grad_(), part.clone().requires_grad_()
            logp, entropy = vocab_parallel_logprobs_and_entropy(h, w, targets, rows, 0.7, 5, masks)
            ((logp * mix[0]).sum() + (entropy * mix[1]).sum()).backward()
            assert h.grad is not None
            assert w.grad is not None
            grads[rank] = h.grad, w.grad
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    expected = reference(h, w, targets, masks, 0.7)
    ((expected[0] * mix[0]).sum() + (expected[1] * mix[1]).sum()).backward()
    assert_close(logp.detach(), expected[0].detach())
    assert_close(entropy.detach(), expected[1].detach())
    assert_close(torch.stack([grad for grad, _ in grads.values()]).sum(0), h.grad)
    assert_close(torch.cat([grad for _, grad in grads.values()]), w.grad)


def test_rank_keeps_mask_ids_of_its_vocabulary_part() -> None:
    """Tokens whose mask is in other parts stay restricted."""
    _, _, _, masks = inputs()
    local = masks.within(100, 50)
    inside = (masks.ids >= 100) & (masks.ids < 150)
    assert torch.equal(local.ids + 100, masks.ids[inside])
    assert torch.equal(local.restricted, masks.restricted)
    assert (local.restricted & (local.sizes == 0)).any()
    padded = local.padded(3)
    assert padded.sizes.tolist() == [*local.sizes.tolist(), 0, 0, 0]
    assert padded.restricted.tolist() == [*local.restricted.tolist(), False, False, False]
