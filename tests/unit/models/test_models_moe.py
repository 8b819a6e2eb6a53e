"""The load-balancing loss of experts against transformers'."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from slurmrl.models.moe import balance_loss


@pytest.mark.parametrize("per_token", [1, 2, 5])
def test_the_balance_of_one_layer_is_that_of_transformers(per_token: int) -> None:
    logits = 2.0 * torch.randn(40, 5, generator=torch.Generator().manual_seed(per_token))
    logits.requires_grad_()
    probabilities = logits.softmax(-1)
    counts = torch.bincount(probabilities.topk(per_token).indices.flatten(), minlength=5)
    ours = balance_loss(probabilities, counts)
    theirs = load_balancing_loss_func((logits,), 5, per_token)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(one, logits)[0] for one in (ours, theirs)))
