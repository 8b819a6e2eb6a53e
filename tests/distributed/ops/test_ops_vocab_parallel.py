"""Log-probabilities and entropies from a vocabulary that ranks share, against whole logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.distributed.ops.vocabulary_cases import Case, Found
from tests.pool import RankPool

HERE = "tests.distributed.ops.vocabulary_cases"


def exact(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return results and gradients in float64, from all logits."""
    hidden, weight, targets, mix = case.inputs()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logq = (hidden @ weight.T / case.temperature).log_softmax(-1)
    logp = logq.gather(-1, targets[:, None]).squeeze(-1)
    entropy = -(logq.exp() * logq).sum(-1)
    ((logp * mix[0]).sum() + (entropy * mix[1]).sum()).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert weight.grad is not None
    return logp.detach(), entropy.detach(), hidden.grad, weight.grad


def computed(ranks: RankPool, n: int, case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the results of all ranks, which must be equal."""
    found: list[Found] = ranks(n, f"{HERE}:compute", case)
    for other in found[1:]:
        assert torch.equal(other.logp, found[0].logp)
        assert torch.equal(other.entropy, found[0].entropy)
    hidden = torch.stack([one.hidden_gradient for one in found]).sum(0)
    weight = torch.cat([one.weight_gradient for one in found])
    return found[0].logp, found[0].entropy, hidden, weight


@pytest.mark.parametrize("chunk", [None, 1, 7, 50])
@pytest.mark.parametrize(("n", "temperature"), [(2, 1.0), (2, 0.6), (3, 1.7)])
def test_values_and_gradients_equal_float64(
    ranks: RankPool, n: int, temperature: float, chunk: int | None
) -> None:
    """50 tokens in chunks that they do not fill; 31 rows, of which the last rank has fewer."""
    case = Case(temperature=temperature, chunk=chunk)
    for ours, expected in zip(computed(ranks, n, case), exact(case), strict=True):
        assert ours.shape == expected.shape
        assert (ours - expected).abs().max() <= 2e-6 * max(1.0, expected.abs().max().item())


def test_bfloat16_inputs_give_float32_results(ranks: RankPool) -> None:
    case = Case(chunk=7, dtype=torch.bfloat16)
    logp, entropy, hidden, weight = computed(ranks, 2, case)
    assert logp.dtype == entropy.dtype == torch.float32
    assert hidden.dtype == weight.dtype == torch.bfloat16
    for ours, expected in zip((logp, entropy), exact(case)[:2], strict=True):
        assert (ours - expected).abs().max() < 0.1


def test_empty_input_gives_empty_output(ranks: RankPool) -> None:
    logp, entropy, hidden, weight = computed(ranks, 2, Case(tokens=0))
    assert logp.shape == entropy.shape == (0,)
    assert hidden.shape == (0, 12)
    assert not weight.any()


def test_full_logits_are_never_kept(ranks: RankPool) -> None:
    """Not even a rank's part is stored: the largest tensor has three numbers per token and rank."""
    case = Case(tokens=400, hidden=4, vocabulary=90, chunk=10)
    for found in ranks(2, f"{HERE}:compute", case):
        assert found.largest <= 2 * 3 * case.tokens < case.tokens * case.vocabulary // 2
