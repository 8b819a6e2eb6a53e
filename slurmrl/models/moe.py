"""The mixture-of-experts block: each token is processed by the top K experts of its router.

T tokens, K experts per token, E experts, h hidden size, i inner size of an expert.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slurmrl.models.balance import Balance, tokens_of_experts
from slurmrl.models.config import ModelConfig
from slurmrl.models.parallel.split import WHOLE, Split
from slurmrl.models.routes import Routes
from slurmrl.tensors.ops.checks import wide
from slurmrl.tensors.ops.experts import grouped_linear
from slurmrl.tensors.ops.gated import gated_product


class ExpertLayer(nn.Module):
    """The gated feed-forward blocks of all experts, with stacked matrices."""

    def __init__(self, experts: int, hidden: int, inner: int, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(experts, inner, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts, inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        self.activation = activation

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [M, h] sorted by expert, counts [E] tokens per expert -> [M, h]."""
        gate, up = (grouped_linear(x, w, counts) for w in (self.gate_proj, self.up_proj))
        return grouped_linear(gated_product(gate, up, self.activation), self.down_proj, counts)


class SparseMLP(nn.Module):
    """A router and its experts. Each tensor rank has a share of every expert's inner units, and the
    whole router."""

    def __init__(self, config: ModelConfig, split: Split = WHOLE) -> None:
        super().__init__()
        self.split = split
        moe = config.moe
        assert moe is not None
        self.gate = nn.Linear(config.hidden_size, moe.experts, bias=False)
        inner = moe.inner // split.tensor.size
        self.experts = ExpertLayer(moe.experts, config.hidden_size, inner, config.activation)
        self.per_token = moe.per_token
        self.normalized = moe.normalized
        self.balance: Balance | None = None
        """The model's load-balancing loss, if it has one."""
        self.number = 0
        """This block's index among those with experts."""
        self.tokens: int | None = None
        """The number of tokens of the next call that are not padding; None for all."""
        self.routes: Routes | None = None
        """What is done about the experts of the next calls; None: the router chooses."""

    def forward(self, x: Tensor) -> Tensor:
        """x [T, h] -> [T, h]."""
        x = self.split.enter(x)
        logits: Tensor = self.gate(x)
        probabilities = logits.softmax(-1, dtype=wide(logits.dtype))
        weights, chosen = probabilities.topk(self.per_token)
        if self.routes is not None:
            taken = self.routes.chosen(self.number, chosen)
            if taken is not chosen:
                weights, chosen = probabilities.gather(-1, taken), taken
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        counts = tokens_of_experts(chosen, probabilities.shape[1])
        if self.balance is not None:
            real = probabilities[: self.tokens]
            loads = tokens_of_experts(chosen[: self.tokens], real.shape[1])
            weights = self.balance.follow(self.number, weights, real, loads)
        order = chosen.flatten().argsort(stable=True)
        outputs = self.experts(x.index_select(0, order // self.per_token), counts)
        parts: Tensor = outputs.index_select(0, order.argsort())
        parts = parts.view(x.shape[0], self.per_token, -1)
        return self.split.leave((parts * weights.to(x.dtype).unsqueeze(-1)).sum(1))
