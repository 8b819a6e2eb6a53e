"""The operators whose results selective checkpointing keeps."""

from __future__ import annotations

import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slurmrl.models.recompute import ATTENTION, PRODUCTS, Recompute
from tests.unit.models.conftest import small_decoder

PROGRAM = """
from slurmrl.models.recompute import ATTENTION, PRODUCTS, _operators
print(*(str(operator) for operator in _operators(ATTENTION) | _operators(PRODUCTS)), sep="\\n")
"""


def test_attention_kernel_results_are_kept_from_the_first_call() -> None:
    """Their import registers the kernels."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    found = done.stdout.split()
    assert "torch_attn._varlen_attn.default" in found
    assert "aten.mm.default" in found


class Calls(TorchDispatchMode):
    """Number of matrix products and attention calls."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.attentions = 0
        self.results: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func._schema.name in PRODUCTS
        self.attentions += func._schema.name in ATTENTION
        out = func(*args, **(kwargs or {}))
        if func._schema.name in PRODUCTS:
            self.results.append(weakref.ref(out.untyped_storage()))
        return out


@pytest.mark.parametrize(
    ("mode", "products", "attentions"), [("off", 0, 0), ("selective", 2, 0), ("full", 6, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selective_recomputation_repeats_only_listed_products(
    mode: Recompute,
    products: int,
    attentions: int,
    dtype: torch.dtype,
) -> None:
    """Of seven products per layer, ``selective`` repeats the first ones of the feed-forward part,
    and ``full`` all but the last.
    """
    decoder = small_decoder("llama").to(dtype)
    decoder.use(mode)
    cu_seqlens = torch.tensor([0, 8], dtype=torch.int32)
    with Calls() as forward:
        loss = decoder(torch.arange(8), cu_seqlens, 8).sum()
    with Calls() as backward:
        loss.backward()
    layers = decoder.config.num_layers
    assert forward.products == 7 * layers
    assert forward.attentions == layers
    assert backward.products == (2 * 7 + products) * layers
    assert backward.attentions == attentions * layers


def test_selective_checkpointing_keeps_only_queries_keys_and_values() -> None:
    decoder = small_decoder("llama")
    decoder.use("selective")
    with Calls() as forward:
        hidden = decoder(torch.arange(8), torch.tensor([0, 8], dtype=torch.int32), 8)
    alive = [storage() is not None for storage in forward.results]
    assert sum(alive) == 3 * decoder.config.num_layers
    hidden.sum().backward()


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointing_does_not_touch_random_states(
    monkeypatch: pytest.MonkeyPatch, mode: Recompute
) -> None:
    """Reading the state of a GPU's generator costs a copy for each layer."""

    def reject(*_: object) -> None:
        raise AssertionError("a random state was read or set")

    decoder = small_decoder("llama")
    decoder.use(mode)
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch, name, reject)
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    decoder(torch.arange(8), cu_seqlens, 5).sum().backward()
    assert all(p.grad is not None for p in decoder.model.layers.parameters())
