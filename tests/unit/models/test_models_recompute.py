"""The operators whose results selective checkpointing keeps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from slurmrl.models.decoder import Decoder
from slurmrl.models.recompute import Recompute

PROGRAM = """
from slurmrl.models.recompute import _kept_operators
print(*(str(operator) for operator in _kept_operators()), sep="\\n")
"""


def test_the_packed_kernels_are_known_before_the_first_attention() -> None:
    """The packed attention kernels are kept even before the first attention call, whose import
    registers them."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    found = done.stdout.split()
    assert "torch_attn._varlen_attn.default" in found
    assert "aten.mm.default" in found


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointing_neither_reads_nor_sets_random_states(
    small_decoder: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch, mode: Recompute
) -> None:
    """Reading the state of a GPU's generator costs a copy for each layer."""

    def refuse(*_: object) -> None:
        raise AssertionError("a random state was read or set")

    decoder = small_decoder("llama")
    decoder.use(mode)
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch, name, refuse)
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    decoder(torch.arange(8), cu_seqlens, 5).sum().backward()
    assert all(p.grad is not None for p in decoder.model.layers.parameters())
