"""The load-balancing loss of experts equals transformers' and, over micro-batches, the formula in
float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from slurmrl.models.architecture import ModelConfig
from slurmrl.models.experts import UNKNOWN, Balance, Pass, Replayed, SparseMLP, balance_loss
from slurmrl.models.parallel.split import WHOLE

TOKENS, EXPERTS, COEFFICIENT = 37, 5, 0.7
ARCHITECTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 29,
    "hidden_size": 20,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


@pytest.mark.parametrize("per_token", [1, 2, 5])
def test_balance_loss_of_one_layer_equals_transformers(per_token: int) -> None:
    logits = 2.0 * torch.randn(40, 5, generator=torch.Generator().manual_seed(per_token))
    logits.requires_grad_()
    probabilities = logits.softmax(-1)
    counts = torch.bincount(probabilities.topk(per_token).indices.flatten(), minlength=5)
    ours = balance_loss(probabilities, counts)
    theirs = load_balancing_loss_func((logits,), 5, per_token)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(one, logits)[0] for one in (ours, theirs)))


def blocks() -> tuple[list[SparseMLP], Balance]:
    """Two blocks of one model in float64."""
    config, generator = ModelConfig.from_hf(ARCHITECTURE), torch.Generator().manual_seed(1)
    balance = Balance(EXPERTS, 2, COEFFICIENT / 2)
    made = [SparseMLP(config).double() for _ in range(2)]
    for block in made:
        block.balance, block.number = balance, balance.join()
        with torch.no_grad():
            for p in block.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return made, balance


def balanced(parts: Sequence[slice]) -> list[Tensor]:
    """Return the gradients of the loss alone by the blocks' inputs and routers."""
    made, balance = blocks()
    inputs = tokens()
    balance.begin(torch.device("cpu"))
    passes: tuple[Pass, ...] = ("count", "train")
    for purpose in passes:
        balance.now = purpose
        for part in parts:
            for block, x in zip(made, inputs, strict=True):
                (block(x[part]) * 0.0).sum().backward()
        if purpose == "count":
            balance.sum_counts([])
            for one in (*inputs, *(block.gate.weight for block in made)):
                one.grad = None
    return [*(x.grad for x in inputs), *(block.gate.weight.grad for block in made)]


def tokens() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (2, TOKENS, ARCHITECTURE["hidden_size"])
    whole = torch.randn(shape, generator=generator, dtype=torch.float64)
    return [x.clone().requires_grad_() for x in whole]


def in_one_piece() -> list[Tensor]:
    """Return the gradients from all router logits at once, by the formula."""
    made, _ = blocks()
    inputs, losses = tokens(), []
    for block, x in zip(made, inputs, strict=True):
        probabilities = (x @ block.gate.weight.t()).softmax(-1)
        chosen = probabilities.argsort(-1, descending=True)[:, :2]
        shares = torch.stack([(chosen == e).double().sum() for e in range(EXPERTS)]) / TOKENS
        losses.append(EXPERTS * (shares * probabilities.mean(0)).sum())
    (COEFFICIENT * torch.stack(losses).mean()).backward()  # type: ignore[no-untyped-call]
    return [*(x.grad for x in inputs), *(block.gate.weight.grad for block in made)]


@pytest.mark.parametrize(
    "cuts", [[0, TOKENS], [0, 20, TOKENS], [0, 1, 3, 4, 17, TOKENS], [*range(TOKENS + 1)]]
)
def test_balance_loss_does_not_depend_on_micro_batches(cuts: list[int]) -> None:
    found = balanced([slice(*pair) for pair in pairwise(cuts)])
    for ours, wanted in zip(found, in_one_piece(), strict=True):
        assert wanted.abs().max() > 1e-3
        torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-14)


def test_recorded_experts_equal_a_loop_over_tokens() -> None:
    """For tokens without a record, the router chooses."""
    block = blocks()[0][0]
    block.balance = None
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(TOKENS, 20, generator=generator, dtype=torch.float64).requires_grad_()
    rows = [torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(TOKENS)]
    recorded = torch.stack(rows)
    recorded[5] = UNKNOWN
    routes = Replayed(torch.stack([recorded.flip(0), recorded], 1))
    block.number, block.routes = 1, routes
    order = torch.randperm(TOKENS, generator=generator)
    routes.arrange(order, WHOLE)
    found = block(x[order])
    wanted = []
    for place, row in enumerate(recorded):
        probabilities = (block.gate.weight @ x[place]).softmax(-1)
        chosen = probabilities.topk(2).indices if place == 5 else row
        weights = probabilities[chosen]
        if block.moe.normalized:
            weights = weights / weights.sum()
        wanted.append(
            sum(w * _expert(block, int(e), x[place]) for w, e in zip(weights, chosen, strict=True))
        )
    reference = torch.stack(cast(Any, wanted))[order]
    torch.testing.assert_close(found, reference)
    mix = torch.randn(found.shape, generator=generator, dtype=found.dtype)
    leaves = (x, block.gate.weight, block.experts.up_proj)
    ours, theirs = (
        torch.autograd.grad((out * mix).sum(), leaves, retain_graph=True)
        for out in (found, reference)
    )
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other)


def _expert(block: SparseMLP, number: int, x: Tensor) -> Tensor:
    experts = block.experts
    gate, up = experts.gate_proj[number] @ x, experts.up_proj[number] @ x
    return experts.down_proj[number] @ (torch.nn.functional.silu(gate) * up)
