"""Tests of on-policy distillation: the sampled-token estimate against the whole distribution."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slurmrl.algorithms.supervised import distill_loss
from slurmrl.algorithms.supervised_schema import Distill
from slurmrl.data.sample import SequenceSample

VOCABULARY = 5


def tokens(logprobs: Tensor, teacher: Tensor) -> SequenceSample:
    """Return a sequence for each token of the vocabulary: a prompt of one token, then
    this token.
    """
    lengths = [[2]] * VOCABULARY
    mask = torch.tensor([True, False] * VOCABULARY)
    data = {"prompt_mask": mask, "logprobs": spread(logprobs), "teacher_logprobs": spread(teacher)}
    keys = dict.fromkeys(data, lengths)
    return SequenceSample(tuple("abcde"), keys, data=dict(data))


def spread(values: Tensor) -> Tensor:
    """Return tensor values [V] placed at the second token of each sequence."""
    return torch.stack([torch.full_like(values, 9.0), values], dim=1).flatten()


def gradient(
    student: Tensor, teacher: Tensor, sampled: Tensor, options: Distill
) -> tuple[Tensor, float]:
    """Return the expected gradient with respect to the student's logits, and the expected loss, of
    tokens with the log-probabilities ``sampled``.
    """
    logits = student.clone().requires_grad_()
    sample = tokens(sampled, teacher)
    total = torch.zeros_like(student)
    value = 0.0
    for index in range(VOCABULARY):
        logp = torch.log_softmax(logits, 0)
        outputs = {"logp": spread(logp[[index]]), "entropy": spread(torch.zeros(1))}
        loss, _ = distill_loss(outputs, sample.take([index]), options)
        (own,) = torch.autograd.grad(loss, logits)
        total += sampled[index].exp() * own
        value += float(sampled[index].exp() * loss.detach())
    return total, value


def exact(student: Tensor, teacher: Tensor) -> tuple[Tensor, float]:
    logits = student.clone().requires_grad_()
    logp = torch.log_softmax(logits, 0)
    kl = (logp.exp() * (logp - teacher)).sum()
    kl.backward()
    assert logits.grad is not None
    return logits.grad, kl.item()


def distributions() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    first, second, third = torch.randn(3, VOCABULARY, generator=generator, dtype=torch.float64)
    return first, torch.log_softmax(second, 0), torch.log_softmax(0.3 * third, 0)


@pytest.mark.parametrize("cap", [None, 100.0])
def test_estimate_equals_the_gradient_of_the_reverse_kl(cap: float | None) -> None:
    """In expectation over the sampled token, value and gradient equal KL(p || teacher)."""
    student, teacher, _ = distributions()
    options = Distill(batch_size=1, importance_cap=cap)
    found, value = gradient(student, teacher, torch.log_softmax(student, 0), options)
    wanted, kl = exact(student, teacher)
    torch.testing.assert_close(found, wanted)
    assert value == pytest.approx(kl)


def test_importance_weights_correct_for_another_sampling_distribution() -> None:
    """With importance weights, tokens of another distribution give the same expectation, unless a
    cap cuts the weights.
    """
    student, teacher, sampled = distributions()
    wanted, _ = exact(student, teacher)
    for cap in (None, 1e3):
        found, _ = gradient(student, teacher, sampled, Distill(batch_size=1, importance_cap=cap))
        torch.testing.assert_close(found, wanted)
    other, _ = gradient(student, teacher, sampled, Distill(batch_size=1, importance_cap=0.5))
    assert (other - wanted).abs().max() > 1e-3
