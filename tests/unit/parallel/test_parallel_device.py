"""The device of a worker is the device of its plan, or there is an error with torch's reason."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from slurmrl.errors import UnusableGpuError, UsageError
from slurmrl.tensors.parallel import device, gpu

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU "
    "driver by downloading and installing a new version."
)


def reject(reason: Exception) -> None:
    raise reason


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Simulate a CUDA build of torch on a machine with a driver."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    monkeypatch.setattr(gpu, "driver_version", lambda: "535.54.03")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1234")
    return monkeypatch


@pytest.mark.parametrize(
    "reason",
    [
        RuntimeError(TOO_OLD),
        RuntimeError("No CUDA GPUs are available"),
        torch.AcceleratorError("CUDA error: system not yet initialized"),
        AssertionError("libcudart functions unavailable. It looks like you have a broken build?"),
    ],
)
def test_gpu_unusable_for_torch_is_a_host_failure_with_the_reason(
    cuda: pytest.MonkeyPatch, reason: Exception
) -> None:
    """Another host may have a newer driver. The failure names host and GPU in fields and not in its
    text, so that equal failures of several hosts are recognized.
    """
    cuda.setattr(torch.cuda, "init", lambda: reject(reason))
    cuda.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnusableGpuError) as caught:
        device.choose(1)
    said = str(caught.value)
    assert " ".join(str(reason).split()) in said
    assert said.endswith(f"[torch {torch.__version__} for CUDA 13.0, driver 535.54.03]")
    assert device.describe_gpu() == "GPU GPU-1234"


def test_cpu_build_of_torch_is_a_user_error_for_gpu_workers(cuda: pytest.MonkeyPatch) -> None:
    """Every host uses the environment of the submission, so another start would fail too."""
    cuda.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(UsageError, match=r"for CPUs only.*--torch cuda"):
        device.choose(1)


def test_workers_without_gpus_use_only_the_cpu(cuda: pytest.MonkeyPatch) -> None:
    cuda.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("init", "set_device"):
        cuda.setattr(torch.cuda, name, lambda *_: reject(AssertionError("a GPU was touched")))
    chosen = device.choose(0)
    device.set_up(chosen, threads=torch.get_num_threads(), deterministic=False)
    assert (chosen.device.type, chosen.backend) == ("cpu", "gloo")


def test_worker_with_a_gpu_computes_on_the_gpu(cuda: pytest.MonkeyPatch) -> None:
    chosen = device.choose(1)
    assert (str(chosen.device), chosen.backend) == ("cuda:0", "nccl")


@pytest.mark.parametrize(
    ("version", "newest"),
    [
        ("450.80.02", 11),
        ("525.60.13", 12),
        ("570.86", 12),
        ("580.65.06", 13),
        ("390.1", 10),
        ("of unknown version", None),
    ],
)
def test_newest_cuda_version_of_a_driver_is_known(
    version: str, newest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "nvidia_smi", lambda: None)
    assert gpu.newest_cuda(version) == newest


def test_cuda_version_includes_forward_compatibility(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's forward compatibility (cuda-compat), of which only nvidia-smi knows."""
    head = "| NVIDIA-SMI 535.54.03    Driver Version: 535.54.03    CUDA Version: 13.0     |"
    monkeypatch.setattr(gpu, "nvidia_smi", lambda: head)
    assert gpu.newest_cuda("535.54.03") == 13


@pytest.mark.parametrize(
    ("deterministic", "of_user", "in_force"),
    [(True, None, b":4096:8"), (True, ":16:8", b":16:8"), (False, None, None)],
)
def test_deterministic_runs_set_the_required_cublas_workspace(
    deterministic: bool,
    of_user: str | None,
    in_force: bytes | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise `deterministic: true` fails on a GPU at its first matrix product. torch reads the
    variable by C's getenv.
    """
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(torch, "set_deterministic_debug_mode", lambda mode: None)
    monkeypatch.setenv("TORCHINDUCTOR_DETERMINISTIC", "")
    monkeypatch.delenv("TORCHINDUCTOR_DETERMINISTIC")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", of_user or "")
    if of_user is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    cpu = device.Accelerator(torch.device("cpu"), "gloo")
    device.set_up(cpu, threads=1, deterministic=deterministic)
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    assert getenv(b"CUBLAS_WORKSPACE_CONFIG") == in_force
    assert os.environ.get("TORCHINDUCTOR_DETERMINISTIC") == ("1" if deterministic else None)
