"""Checks of the operators' arguments, and uploads of indices that are made in host memory.

Checks raise UsageError with the argument, its value and the allowed values. No check waits for a
GPU. Values of offsets are checked only on CPUs; on GPUs, kernels stay within their tensors for any
offsets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slurmrl.errors import UsageError

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OFFSETS = (torch.int32, torch.int64)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums of this dtype: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_vector(
    name: str, tensor: Tensor, length: int, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Raise UsageError unless a tensor is 1-D with this length, device and one of the dtypes."""
    check_tensor(name, tensor, (length,), dtypes, device)


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Raise UsageError unless a tensor has this shape, device and one of the dtypes."""
    if tensor.shape != shape:
        raise UsageError(f"{name} must have shape {list(shape)}, not {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise UsageError(f"{name} must be {_names(dtypes)}, not {_names((tensor.dtype,))}")
    if tensor.device != device:
        raise UsageError(f"{name} must be on {device} like the first argument, not {tensor.device}")


def check_first(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise UsageError unless a tensor is 1-D with one of the dtypes."""
    if tensor.dim() != 1:
        raise UsageError(f"{name} must be 1-D, not of shape {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise UsageError(f"{name} must be {_names(dtypes)}, not {_names((tensor.dtype,))}")


def check_offsets(offsets: Tensor, total: int, device: torch.device) -> None:
    """Raise UsageError unless offsets [S+1] of int32 or int64 increase from 0 to ``total``."""
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise UsageError(f"cu_seqlens must have shape [sequences + 1], not {list(offsets.shape)}")
    check_vector("cu_seqlens", offsets, offsets.shape[0], OFFSETS, device)
    if offsets.shape[0] == 1 and total > 0:
        raise UsageError(f"cu_seqlens has no sequence, but there are {total} elements")
    if device.type != "cpu":
        return
    first, last = int(offsets[0]), int(offsets[-1])
    if (first, last) != (0, total):
        raise UsageError(f"cu_seqlens must run from 0 to {total}, not from {first} to {last}")
    if not bool((offsets[1:] >= offsets[:-1]).all()):
        raise UsageError(f"cu_seqlens must not decrease: {_around_first_fall(offsets)}")


def check_share(name: str, value: float) -> None:
    """Raise UsageError unless a factor is between 0 and 1."""
    if not (math.isfinite(value) and 0.0 <= value <= 1.0):
        raise UsageError(f"{name} must be between 0 and 1, not {value}")


def _around_first_fall(offsets: Tensor) -> str:
    where = int((offsets[1:] < offsets[:-1]).nonzero()[0])
    return f"entry {where} is {int(offsets[where])}, entry {where + 1} is {int(offsets[where + 1])}"


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


@dataclass(frozen=True)
class OnHost:
    """A tensor that stays in host memory as an argument of a sharded module.

    FSDP would copy a plain tensor to the GPU, and the host would wait for the copy.
    """

    tensor: Tensor


def upload(indices: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Return copies on ``device`` of 1-D int64 tensors in host memory.

    A GPU gets all tensors in one copy from pinned memory. The host does not wait for this copy.
    """
    if device.type != "cuda":
        return tuple(index.to(device) for index in indices)
    sizes = [index.shape[0] for index in indices]
    packed = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
    torch.cat(list(indices), out=packed)
    return packed.to(device, non_blocking=True).split_with_sizes(sizes)
