"""Checks of operators' arguments: an error names the argument, what it is and what it must be.

Nothing here waits for a GPU. What offsets hold is read on a CPU only; on a GPU the kernels stay
inside their tensors whatever the offsets are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slurmrl.errors import UsageError

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OFFSETS = (torch.int32, torch.int64)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over a dtype are computed and returned in: float64 for itself, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_vector(
    name: str, tensor: Tensor, length: int, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """A 1-D tensor of that length, on that device, with one of those dtypes."""
    check_tensor(name, tensor, (length,), dtypes, device)


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """A tensor of that shape, on that device, with one of those dtypes."""
    if tensor.shape != shape:
        raise UsageError(f"{name} must have shape {list(shape)}, not {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise UsageError(f"{name} must be {_names(dtypes)}, not {_names((tensor.dtype,))}")
    if tensor.device != device:
        raise UsageError(f"{name} must be on {device} as the first argument, not {tensor.device}")


def check_first(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """A 1-D tensor that the others are measured by."""
    if tensor.dim() != 1:
        raise UsageError(f"{name} must be 1-D, not of shape {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise UsageError(f"{name} must be {_names(dtypes)}, not {_names((tensor.dtype,))}")


def check_offsets(name: str, offsets: Tensor, total: int, device: torch.device) -> None:
    """[S+1] of int32 or int64, from 0 up to ``total``."""
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise UsageError(f"{name} must have shape [sequences + 1], not {list(offsets.shape)}")
    check_vector(name, offsets, offsets.shape[0], OFFSETS, device)
    if offsets.shape[0] == 1 and total > 0:
        raise UsageError(f"{name} names no sequence for {total} elements")
    if device.type != "cpu":
        return
    first, last = int(offsets[0]), int(offsets[-1])
    if (first, last) != (0, total):
        raise UsageError(f"{name} must go from 0 to {total}, not from {first} to {last}")
    if not bool((offsets[1:] >= offsets[:-1]).all()):
        raise UsageError(f"{name} must not decrease: {_around_first_fall(offsets)}")


def check_share(name: str, value: float) -> None:
    """A factor between 0 and 1."""
    if not (math.isfinite(value) and 0.0 <= value <= 1.0):
        raise UsageError(f"{name} must lie between 0 and 1, not {value}")


def _around_first_fall(offsets: Tensor) -> str:
    where = int((offsets[1:] < offsets[:-1]).nonzero()[0])
    return f"entry {where} is {int(offsets[where])}, entry {where + 1} is {int(offsets[where + 1])}"


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
