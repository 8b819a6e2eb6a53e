"""Tests of the memory that moves allocate on a rank in addition to both models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slurmrl.tensors.layout import Box, Layout, Shard, TensorSpec
from slurmrl.tensors.transfer import execute
from slurmrl.tensors.transfer.plan import PlacedLayout, plan_move
from tests.support.host_memory import peak_bytes

SHAPE = (1, 96, 4096)
BYTES = 4 * 96 * 4096


def move(source: Tensor, target: Tensor, eta: float) -> int:
    """Move one tensor inside this process; returns the bytes that were allocated meanwhile."""
    sides = []
    for tensor in (source, target):
        spec = TensorSpec(SHAPE, str(tensor.dtype).removeprefix("torch."))
        shard = Shard.contiguous("w", Box.whole(SHAPE))
        sides.append(PlacedLayout(Layout.of({"w": spec}, [[shard]]), (0,)))
    plan = plan_move(*sides, hosts={0: 0}, budget=1 << 20)
    held, taken = (
        execute.Holdings(side, 0, {"w": tensor})
        for side, tensor in zip(sides, (source, target), strict=True)
    )
    device = torch.device("cpu")
    mover = execute.Mover(plan, 0, held, taken, group=None, device=device, eta=eta)
    return peak_bytes(mover.run)


def test_verification_makes_no_copy_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of a matrix are converted and summed in blocks, and have the sum of their copy."""
    columns = torch.randn(192, 8192)[:, :4096]
    copy = columns.to(torch.bfloat16).contiguous()
    monkeypatch.setattr(execute, "BLOCK", 4096)
    found = []
    peak = peak_bytes(lambda: found.append(execute.checksum(columns, torch.bfloat16)))
    assert peak < 6 * 8 * 4096 < copy.nbytes // 4
    assert found[0] == execute.checksum(copy, torch.bfloat16)
    copy[5, [1, 2]] = copy[5, [2, 1]]
    assert found[0] != execute.checksum(copy, torch.bfloat16)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eta", [1.0, 0.25])
def test_conversion_and_moving_average_make_no_copy_of_a_tensor(
    source: torch.dtype, target: torch.dtype, eta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor is converted and averaged in blocks of bounded size, whatever its own size is."""
    monkeypatch.setattr(execute, "BLOCK", 4096)
    new, old = torch.randn(SHAPE).to(source), torch.randn(SHAPE).to(target)
    expected = old.double().lerp(new.double(), eta)
    assert move(new, old, eta) <= 3 * 4 * 4096 < BYTES // 16
    rounding = 0.01 if torch.bfloat16 in (source, target) else 1e-6
    torch.testing.assert_close(old.double(), expected, rtol=rounding, atol=rounding)
