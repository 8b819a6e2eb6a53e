"""Waiting for GPU memory that an earlier process has not freed yet."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from slurmrl.errors import UnusableGpuError
from slurmrl.tensors.parallel import device, gpu

GIB = 2**30
DEVICE = torch.device("cuda", 0)
HOLDER = "4711, /usr/bin/python3, 37000 MiB\n"


class Card:
    """A GPU of 80 GiB, of which other processes use ``held(now)`` GiB."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        held: Callable[[float], float],
        integrated: int = 0,
    ) -> None:
        self.now, self.held = 0.0, held
        known = SimpleNamespace(uuid="1f-2", is_integrated=integrated)
        monkeypatch.setattr(torch.cuda, "mem_get_info", self.look)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known)
        monkeypatch.setattr(gpu, "nvidia_smi", lambda *words: HOLDER)

    def look(self, device: torch.device) -> tuple[int, int]:
        held = self.held(self.now)
        if held >= 80:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return int((80 - held) * GIB), 80 * GIB

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, *, exclusive: bool = True) -> float:
        """Return the seconds of a wait."""
        device.wait_until_free(
            DEVICE, exclusive=exclusive, clock=lambda: self.now, sleep=self.sleep
        )
        return self.now


def test_worker_waits_for_memory_of_an_exiting_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At first, the GPU may lack memory even for a context."""
    card = Card(monkeypatch, lambda now: 80 if now < 10 else 37 if now < 60 else 0.6)
    assert card.wait() == 60
    assert "pid 4711 (/usr/bin/python3, 37000 MiB)" in caplog.text


@pytest.mark.parametrize("held", [0.0, 0.6, 3.9])
def test_worker_does_not_wait_for_its_own_cuda_context(
    monkeypatch: pytest.MonkeyPatch, held: float
) -> None:
    assert Card(monkeypatch, lambda now: held).wait() == 0


def test_permanently_occupied_gpu_is_a_host_failure_naming_the_holder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trial may continue on another host, instead of failing with an out-of-memory error."""
    card = Card(monkeypatch, lambda now: 37)
    with pytest.raises(UnusableGpuError) as caught:
        card.wait()
    assert card.now == device.WAIT_S
    for words in ("37.0 of the GPU's 80.0 GiB are in use after 120 s", "pid 4711"):
        assert words in str(caught.value)


def test_shared_gpu_is_used_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the user's own machine, two small trials may share a GPU."""
    assert Card(monkeypatch, lambda now: 37).wait(exclusive=False) == device.WAIT_S


def test_gpu_with_host_memory_is_used_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Card(monkeypatch, lambda now: 37, integrated=1).wait() == 0


def test_cuda_error_during_the_memory_check_is_raised_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Card(monkeypatch, lambda now: 0)
    fault = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")

    def look(device: torch.device) -> tuple[int, int]:
        raise fault

    monkeypatch.setattr(torch.cuda, "mem_get_info", look)
    with pytest.raises(torch.AcceleratorError):
        card.wait()
