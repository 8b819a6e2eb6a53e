"""The feed-forward blocks. Each tensor rank has a share of the inner units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from slurmrl.models.config import ModelConfig
from slurmrl.models.parallel.linear import RowLinear
from slurmrl.models.parallel.split import WHOLE, Split

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer 2020, GLU variants)."""

    def __init__(self, config: ModelConfig, split: Split = WHOLE) -> None:
        super().__init__()
        self.split = split
        hidden, inner = config.hidden_size, config.intermediate_size // split.tensor.size
        self.gate_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = RowLinear(inner, hidden, bias=config.mlp_bias, split=split)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """x [T, h] -> [T, h]."""
        x = self.split.enter(x)
        out: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class PlainMLP(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, config: ModelConfig, split: Split = WHOLE) -> None:
        super().__init__()
        self.split = split
        hidden, inner = config.hidden_size, config.intermediate_size // split.tensor.size
        self.up_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = RowLinear(inner, hidden, bias=config.mlp_bias, split=split)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """x [T, h] -> [T, h]."""
        x = self.split.enter(x)
        out: Tensor = self.down_proj(self.activation(self.up_proj(x)))
        return out
