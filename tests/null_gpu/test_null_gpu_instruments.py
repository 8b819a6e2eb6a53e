"""Helpers of this lane: counters, call sites of waits, values."""

from __future__ import annotations

import pytest
import torch

from tests.null_gpu import device
from tests.null_gpu.values import SMALL_ELEMENTS, SmallValues


def test_stub_gpu_counts_launches_products_copies_and_waits() -> None:
    a = torch.zeros(64, 64, device="cuda")
    with device.counted() as found:
        b = (a + 1) @ a
        b.sum().item()
    assert found["launches"] == 2  # the sum of a and 1, and that of b
    assert found["products"] == 1
    assert (found["to_host"], found["to_host_bytes"]) == (1, 4)
    assert found["waits"] == 1


def test_stub_gpu_rejects_a_tensor_on_another_device() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="cuda") + torch.ones(3)


def test_stub_gpu_limits_memory_like_a_real_gpu() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device="cuda")


def test_stub_gpu_computes_value_dependent_shapes_like_a_cpu() -> None:
    def results(where: str) -> list[list[float]]:
        numbers = torch.arange(10, device=where)
        mask = numbers % 3 == 0
        x = torch.ones(10, device=where, requires_grad=True)
        picked = (2 * x)[mask]
        picked.sum().backward()
        assert x.grad is not None
        changed = torch.zeros(10, device=where)
        changed[mask] = torch.arange(4.0, device=where)
        counts = torch.tensor([1, 2, 3], device=where)
        found = [picked, x.grad, changed, mask.nonzero(), counts.repeat_interleave(counts)]
        return [tensor.tolist() for tensor in found]

    with SmallValues():
        found = results("cuda")
    assert found == results("cpu")


def test_stub_gpu_results_of_large_tensors_are_zero() -> None:
    with SmallValues():
        large = torch.ones(SMALL_ELEMENTS + 1, device="cuda")
        assert large.sum().item() == 0.0
        assert (large.sum() + 1).item() == 1.0
        assert large[:3].tolist() == [0.0, 0.0, 0.0]
