"""Copies of tensors in host memory."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmrl.engines.host import HostBuffer, HostCopies


class Cudart:
    """CUDA's page-locking with a record of locked memory. ``code``: the returned value."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.locked[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        maps = [
            line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
        ]
        assert any(int(first, 16) <= address < int(last, 16) for first, last in maps), "unmapped"
        del self.locked[address]
        return 0


def use(monkeypatch: pytest.MonkeyPatch, cudart: Cudart) -> Cudart:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    return cudart


def state(**changes: Any) -> dict[str, torch.Tensor]:
    """Return tensors whose sizes are far from powers of two."""
    tensors = {f"layer.{number}": torch.rand(1025, 257) for number in range(8)}
    tensors |= {
        "norm": torch.rand(3).bfloat16(),
        "empty": torch.empty(0, 4),
        "scalar": torch.ones(()),
    }
    return tensors | changes


def test_pinned_buffer_has_its_size_and_is_unpinned_before_unmapping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No byte beyond the requested ones is page-locked; views outlive the lock."""
    cudart, size = use(monkeypatch, Cudart()), (5 << 30) // 4 + 1
    buffer = HostBuffer(size, locked=True)
    assert list(cudart.locked.values()) == [size]
    assert all(address % mmap.PAGESIZE == 0 for address in cudart.locked)
    view = buffer.bytes[:8]
    del buffer
    assert cudart.locked == {}
    view.fill_(7)
    assert view.tolist() == [7] * 8


def test_error_about_unpinnable_memory_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Cudart(code=2))
    with pytest.raises(MemoryError, match=r"1\.5 GiB .*CUDA error 2.*cluster\.mem_per_worker"):
        HostBuffer(3 << 29, locked=True)


def test_host_copies_share_one_buffer_of_their_total_size() -> None:
    tensors = state()
    copies = HostCopies().copy(tensors)
    storages = {
        copy.untyped_storage().data_ptr(): copy.untyped_storage() for copy in copies.values()
    }
    assert len([one for one in storages.values() if one.nbytes()]) == 1
    needed = sum(tensor.nbytes for tensor in tensors.values())
    assert max(one.nbytes() for one in storages.values()) <= needed + 64 * len(tensors)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    for name, copy in copies.items():
        assert copy.dtype == before[name].dtype
        assert torch.equal(copy, before[name])


def test_host_buffer_is_reused_until_the_tensors_change() -> None:
    """Equal shapes reuse the memory; other shapes get a buffer of their own size."""
    host = HostCopies()
    first = host.copy(state())
    again = host.copy(state())
    assert [copy.data_ptr() for copy in first.values()] == [
        copy.data_ptr() for copy in again.values()
    ]
    larger = state(more=torch.rand(1 << 20))
    changed = host.copy(larger)
    assert all(torch.equal(changed[name], tensor) for name, tensor in larger.items())
