"""Tests of a worker and its GPU outside training: choice of the device, memory, NCCL's flight
recorder.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from slurmrl.errors import UnusableGpuError
from slurmrl.tensors.parallel import device
from slurmrl.workers.distributed import Collectives
from tests.null_gpu import cases


def test_free_gpu_is_used_at_once_and_named() -> None:
    with cases.first_of(1):
        began = time.monotonic()
        device.wait_until_free(device.GPU.device, exclusive=True)
        assert time.monotonic() - began < device.WAIT_S
        assert device.pending_error() is None
        name = torch.cuda.get_device_name()
        assert device.describe_gpu().startswith(f"GPU 0 ({name}, GPU-")


def test_memory_held_by_another_process_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    free, total = torch.cuda.mem_get_info()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free // 2, total))
    monkeypatch.setattr(device, "WAIT_S", 0.0)
    with pytest.raises(UnusableGpuError, match="GiB are in use after 0 s"):
        device.wait_until_free(device.GPU.device, exclusive=True)


def test_waiting_nccl_collective_is_explained_and_its_end_recorded() -> None:
    """torch's watchdog checks every 100 ms, so an ended collective may still count as pending."""
    with cases.first_of(4):
        group = dist.new_group([0, 1, 2, 3])
        collectives = Collectives()
        deadline = time.monotonic() + 60
        while True:
            dist.all_reduce(torch.ones(5, device="cuda"), group=group)
            collectives.waiting()
            if (waiting := collectives.waiting()) is not None:
                break
            assert time.monotonic() < deadline, "no collective was ever pending"
        assert (waiting.name, waiting.ranks) == ("all_reduce", (0, 1, 2, 3))
        assert 0 <= waiting.since_s < 60
        line = f"all_reduce #{waiting.number} of group {waiting.group}, [5]"
        while f"{line}: ended" not in collectives.recorded():
            assert time.monotonic() < deadline, collectives.recorded()
            time.sleep(0.05)
        assert collectives.waiting() is None
