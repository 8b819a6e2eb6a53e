"""Low-rank adapters of a decoder's linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from slurmrl.config.schema.roles import Lora
from slurmrl.models.adapters import LORA_A, LORA_B
from slurmrl.models.decoder import Decoder
from slurmrl.models.parallel.linear import Linear
from slurmrl.models.parallel.split import Split
from slurmrl.tensors.ops.products import Dropout, low_rank_linear
from slurmrl.tensors.ops.splitmix import hash64


class Adapters:
    """The adapters of one decoder, which can be switched off, and their dropout."""

    def __init__(self, lora: Lora) -> None:
        self.rank, self.scale, self.dropout = lora.rank, lora.scale, lora.dropout
        self._salts: dict[nn.Module, int] = {}
        self._used = True
        self._keys: Tensor | None = None
        """Dropout keys [T] int64 of the packed batch; None without dropout."""
        self._own_keys: Tensor | None = None
        """Dropout keys of the tokens in the order in which the layers read them."""

    @contextmanager
    def unused(self) -> Iterator[None]:
        """Return a context in which only the frozen weights are used."""
        self._used = False
        try:
            yield
        finally:
            self._used = True

    @contextmanager
    def dropping(self, keys: Tensor) -> Iterator[None]:
        """Return a context with dropout for tokens with these ``keys`` [T] int64."""
        self._keys = keys
        try:
            yield
        finally:
            self._keys = self._own_keys = None

    def arrange(self, order: Tensor, split: Split) -> None:
        if self._keys is not None:
            self._own_keys = split.own_tokens(self._keys[order])

    def product(self, layer: Linear, x: Tensor) -> Tensor | None:
        """Return the addition to a layer's output, in x's dtype; None while switched off."""
        if not self._used:
            return None
        dropout = None
        if self._own_keys is not None:
            dropout = Dropout(self._own_keys, self._salts[layer], self.dropout, layer.first)
        a, b = (layer.get_parameter(name).to(x.dtype) for name in (LORA_A, LORA_B))
        return low_rank_linear(x, a, b, self.scale, dropout)

    def add(self, layer: nn.Module, name: str) -> None:
        """Add an adapter with uninitialized float32 matrices to the layer of this name."""
        weight = layer.get_parameter("weight")
        rows, columns = weight.shape
        for matrix, shape in ((LORA_A, (self.rank, columns)), (LORA_B, (rows, self.rank))):
            empty = torch.empty(shape, dtype=torch.float32, device=weight.device)
            layer.register_parameter(matrix, nn.Parameter(empty))
        self._salts[layer] = hash64(name)


def attach(decoder: Decoder, lora: Lora) -> Adapters:
    """Freeze a decoder's parameters, except for a value head, and add adapters to linear layers.

    Trained parameters are in float32.
    """
    decoder.requires_grad_(False)
    if decoder.head == "value":
        decoder.score.float().requires_grad_(True)
    adapters = Adapters(lora)
    for name, layer in decoder.named_modules():
        if isinstance(layer, Linear) and lora.adapts(name.rpartition(".")[2]):
            adapters.add(layer, name)
            layer.adapter = adapters
    decoder.adapters = adapters
    return adapters
