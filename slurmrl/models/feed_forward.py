"""The feed-forward blocks and the norm of the built-in families."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slurmrl.models.config import ModelConfig
from slurmrl.models.parallel.linear import Linear, RowLinear
from slurmrl.models.parallel.split import WHOLE, Split
from slurmrl.tensors.ops.elementwise import ACTIVATIONS, gated_linear, gated_product, rms_norm


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer 2020, GLU variants)."""

    recomputed = False
    """Whether the backward pass calls the block again. Then it may hold one more tensor, the input
    of the last product, so that the second call ends before that product."""

    def __init__(self, config: ModelConfig, split: Split = WHOLE) -> None:
        super().__init__()
        self.split = split
        hidden, inner = config.hidden_size, config.intermediate_size // split.tensor.size
        self.gate_proj = Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = RowLinear(inner, hidden, bias=config.mlp_bias, split=split)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output [T, h] for ``x`` [T, h]."""
        x, down = self.split.enter(x), self.down_proj
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.recomputed or down.adapter is not None:
            inner = gated_product(gate, up, self.activation)
            products = down.adapted(F.linear(inner, down.weight), inner)
        else:
            products = gated_linear(gate, up, down.weight, self.activation)
        return down.whole(products)


class PlainMLP(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, config: ModelConfig, split: Split = WHOLE) -> None:
        super().__init__()
        self.split = split
        hidden, inner = config.hidden_size, config.intermediate_size // split.tensor.size
        self.up_proj = Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = RowLinear(inner, hidden, bias=config.mlp_bias, split=split)
        self.activation = ACTIVATIONS[config.activation].value

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output [T, h] for ``x`` [T, h]."""
        x = self.split.enter(x)
        out: Tensor = self.down_proj(self.activation(self.up_proj(x)))
        return out


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, times the weight or (1 + weight)."""

    def __init__(self, size: int, eps: float, *, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if offset else torch.ones(size))
        self.eps = eps
        self.offset = float(offset)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)
