"""Layers in one compiled call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from slurmrl.models import inference
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.inference import short_forward
from slurmrl.models.paged import PagedCache, PagedCall, PagedCore
from slurmrl.models.parallel.linear import RowLinear
from slurmrl.models.parallel.split import Axis, Split
from slurmrl.tensors.ops.attention import Packing
from slurmrl.tensors.ops.products import PackedLayer
from tests.unit.models.conftest import BASE, ODD, random_decoder

PAGE, PAGES = 4, 40


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("tokens", [1, 13])
@pytest.mark.parametrize(
    "name", ["llama-biases", "llama-wide-heads", "qwen2", "qwen2-odd-hidden", "mistral"]
)
def test_fused_layer_equals_its_parts_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch, name: str, tokens: int
) -> None:
    """Covers a decode step of rows with cells of earlier calls, and the cells that it writes."""
    decoder = random_decoder(ModelConfig.from_hf({**BASE, **ODD[name]}))
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 3 * PAGE, (tokens,), generator=draw)
    tables = torch.arange(3 * tokens).view(tokens, 3)
    last = lengths - 1
    call = PagedCall(
        slots=tables.gather(1, (last // PAGE)[:, None])[:, 0] * PAGE + last % PAGE,
        fresh=Packing(torch.zeros(1, dtype=torch.int32), 0),
        fresh_tokens=0,
        tables=tables,
        rows=torch.arange(tokens),
        lengths=lengths,
        longest=3 * PAGE,
    )
    ids = torch.randint(decoder.config.vocab_size, (tokens,), generator=draw)
    forward, found, calls = short_forward(decoder), [], []
    assert forward is not None
    decode = PackedLayer.decode

    def counted(self: PackedLayer, *arguments: Tensor, **sizes: float) -> Tensor:
        calls.append(self)
        return decode(self, *arguments, **sizes)  # type: ignore[arg-type]

    monkeypatch.setattr(PackedLayer, "decode", counted)
    for whole in (True, False):
        if not whole:
            monkeypatch.setattr(PagedCore, "of_layer", lambda *_: None)
        cache = PagedCache(decoder, PAGE)
        cache.grow(PAGES)
        for slabs in cache.layers:
            for slab in slabs:
                slab.copy_(numbers(*slab.shape))
        hidden = forward(ids, last, PagedCore(cache, call))
        found.append([hidden, *(slab for slabs in cache.layers for slab in slabs)])
    assert len(calls) == decoder.config.num_layers
    for one, parts in zip(*found, strict=True):
        assert torch.equal(one, parts)


def test_row_split_layer_adds_its_product_without_packed_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensor ranks on GPUs, and models in bfloat16, do not pack their matrices."""
    monkeypatch.setattr(Split, "leave", lambda _, x: x)
    layer = RowLinear(6, 4, bias=True, split=Split(Axis(0, 2))).requires_grad_(False)
    total, x = numbers(3, 4), numbers(3, 6)
    wanted = total + F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(inference._add_product(layer, packed=False)(total, x), wanted)
