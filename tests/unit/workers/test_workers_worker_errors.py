"""The classification of a rank's exceptions, such as consequences of another rank's end, or lack of
memory.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from slurmrl.errors import UnusableGpuError
from slurmrl.run.reports import Failure, RankId
from slurmrl.tensors.parallel import device
from slurmrl.workers.worker.orders import _failure_of, _Place, recognize

GLOO = (
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[127.0.0.1]:4242"
)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError("Connection reset by peer"),
        RuntimeError("NCCL communicator was aborted on rank 1."),
        dist.DistNetworkError("The client socket has timed out after 60000ms"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
        ConnectionResetError(104, "Connection reset by peer"),
        BrokenPipeError(32, "Broken pipe"),
    ],
)
def test_connection_errors_are_recognized_as_consequences(error: Exception) -> None:
    assert recognize(error) == Failure(cause="exception", echo=True)


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")]
)
def test_out_of_memory_is_recognized(error: Exception) -> None:
    assert recognize(error) == Failure(cause="oom")


@pytest.mark.parametrize(
    "error",
    [ValueError("Connection closed by peer"), RuntimeError("shapes differ"), SystemExit(0)],
)
def test_unrecognized_error_has_cause_exception(error: BaseException) -> None:
    assert recognize(error) == Failure(cause="exception")


def accelerator_error(text: str, code: int | None = None) -> RuntimeError:
    """Return the error as torch raises it. Older versions set no code."""
    error = torch.AcceleratorError(f"CUDA error: {text}\nSearch for `cudaError…' in CUDA's docs")
    if code is not None:
        error.error_code = code  # type: ignore[attr-defined]
    return error


UNHANDLED = (
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with NCCL_DEBUG=INFO for "
    "details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nCuda failure 214 'uncorrectable ECC error encountered'"
)


@pytest.mark.parametrize(
    ("error", "certain"),
    [
        (accelerator_error("uncorrectable ECC error encountered", 214), True),
        (accelerator_error("uncorrectable ECC error encountered"), True),
        (accelerator_error("in another language", 220), True),
        (accelerator_error("uncorrectable NVLink error detected during the execution"), True),
        (accelerator_error("unspecified launch failure", 719), False),
        (RuntimeError("CUDA error: unspecified launch failure"), False),
        (accelerator_error("unknown error", 999), False),
        (RuntimeError("NVML: GPU is lost. Reboot the system to recover this GPU"), True),
        (RuntimeError("Unable to determine the device: GPU 0000:3B:00.0 fell: device lost"), True),
        (RuntimeError("GPU at PCI:0000:3b:00: GPU has fallen off the bus."), True),
        (RuntimeError("NVRM: Xid (PCI:0000:3b:00): 79, pid=7"), False),
        (dist.DistBackendError(UNHANDLED), True),
    ],
)
def test_gpu_failure_is_not_blamed_on_the_code(error: Exception, certain: bool) -> None:
    """The failure does not count as a consequence of another rank's end either."""
    assert recognize(error) == Failure(
        cause="gpu_fault", gpu=device.describe_gpu(), certain=certain
    )


def test_gpu_unusable_for_torch_is_a_host_fault() -> None:
    """The fault is not certain, because an old driver on two hosts counts against the trial."""
    found = recognize(UnusableGpuError("The NVIDIA driver on your system is too old"))
    assert (found.cause, found.certain) == ("gpu_fault", False)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (accelerator_error("an illegal memory access was encountered", 700), "exception"),
        (accelerator_error("device-side assert triggered", 710), "exception"),
        (accelerator_error("misaligned address", 716), "exception"),
        (accelerator_error("an illegal instruction was encountered", 715), "exception"),
        (torch.OutOfMemoryError("CUDA out of memory. 3 GiB lost to fragmentation"), "oom"),
        (ValueError("row 3: unspecified launch failure of a rocket"), "exception"),
        (RuntimeError("shapes differ: unknown error"), "exception"),
        (accelerator_error("its code counts: unspecified launch failure", 700), "exception"),
    ],
)
def test_bugs_and_out_of_memory_are_not_blamed_on_the_gpu(error: Exception, cause: str) -> None:
    assert recognize(error) == Failure(cause=cause)


def test_gpu_fault_is_found_in_the_cause_of_a_library_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuBLAS and cuDNN report their own status, so slurmrl asks CUDA for the cause."""
    hidden = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`")
    monkeypatch.setattr(device, "pending_error", lambda: None)
    assert recognize(hidden) == Failure(cause="exception")
    pending = accelerator_error("uncorrectable ECC error encountered", 214)
    monkeypatch.setattr(device, "pending_error", lambda: pending)
    assert recognize(hidden).cause == "gpu_fault"


def test_gpu_check_does_not_wait_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective that never ends must not delay the report."""
    assert device.pending_error() is None, "a process that uses no GPU"
    fault = accelerator_error("unspecified launch failure", 719)

    def query() -> None:
        raise fault

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=query))
    assert device.pending_error() is fault


def test_cause_of_a_chained_exception_is_recognized() -> None:
    error = LookupError("no batch")
    error.__cause__ = RuntimeError(GLOO)
    assert recognize(error) == Failure(cause="exception", echo=True)


def test_error_of_another_world_names_the_world() -> None:
    """The number without the world would name a trainer."""
    failure = _failure_of(ValueError("bad"), RankId("rollout/2", 0), _Place("gen", 1))
    assert failure.reason == "rank 0 of rollout/2: ValueError: bad"
    assert (failure.world, failure.rank) == ("rollout/2", 0)
