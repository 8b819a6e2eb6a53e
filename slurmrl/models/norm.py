"""The norm of the built-in families, as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slurmrl.tensors.ops.norm import rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, times the weight or (1 + weight)."""

    def __init__(self, size: int, eps: float, *, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if offset else torch.ones(size))
        self.eps = eps
        self.offset = float(offset)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)
