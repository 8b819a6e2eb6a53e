"""Flash attention on packed sequences: flash-attn's kernel if it is installed, else torch's own.
Both need a GPU and half precision.

T packed tokens, S sequences, Hq query heads, Hkv key and value heads, D head size.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from slurmrl import log

logger = log.get(__name__)

HALF = (torch.bfloat16, torch.float16)
HEAD_MULTIPLE = 8
MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)


def fits(q: Tensor) -> bool:
    """Whether a kernel supports these queries [T, Hq, D]."""
    tokens, _, size = q.shape
    return (
        tokens > 0
        and q.is_cuda
        and q.dtype in HALF
        and size % HEAD_MULTIPLE == 0
        and size <= MAX_HEAD_DIM
        and torch.cuda.get_device_capability(q.device) >= MIN_CAPABILITY
    )


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """Causal attention within each sequence, over the last ``window`` tokens if it is set.

    q [T, Hq, D]; k, v [T, Hkv, D]; cu_seqlens [S+1] int32. Returns [T, Hq, D].
    """
    seen = (-1 if window is None else window - 1, 0)
    kernel = _flash_attn if _has_flash_attn() else _torch
    return kernel(q, k, v, cu_seqlens, longest, scale, seen)


def register() -> None:
    """Register the kernels' operators with torch, by importing them."""
    _has_flash_attn()
    importlib.import_module("torch.nn.attention.varlen")


@cache
def _has_flash_attn() -> bool:
    """Whether flash-attn is installed; some releases lack the function."""
    if importlib.util.find_spec("flash_attn") is None:
        return False
    try:
        return hasattr(importlib.import_module("flash_attn"), "flash_attn_varlen_func")
    except ImportError as error:
        logger.warning(
            "flash-attn was built for another torch or CUDA release; using torch's kernel: %s",
            error,
        )
        return False


def _flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu: Tensor,
    longest: int,
    scale: float,
    seen: tuple[int, int],
) -> Tensor:
    kernel = importlib.import_module("flash_attn").flash_attn_varlen_func
    out: Tensor = kernel(
        *(q, k, v, cu, cu, longest, longest),
        softmax_scale=scale,
        causal=True,
        window_size=seen,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out


def _torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu: Tensor,
    longest: int,
    scale: float,
    seen: tuple[int, int],
) -> Tensor:
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    # torch 2.11 supports grouped key heads without this argument.
    options = {"enable_gqa": q.shape[1] != k.shape[1]} if _has_enable_gqa(varlen_attn) else {}
    out: Tensor = varlen_attn(
        q, k, v, cu, cu, longest, longest, scale=scale, window_size=seen, **options
    )
    return out


@cache
def _has_enable_gqa(function: Callable[..., Tensor]) -> bool:
    return "enable_gqa" in inspect.signature(function).parameters
