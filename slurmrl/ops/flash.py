"""The kernels that take packed sequences as they are: flash-attn where it is installed, else
torch's own. Both run on GPUs in half precision.

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
    """Whether a kernel takes these queries [T, Hq, D]."""
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
    """Causal attention within each sequence, each token over itself and at most ``window`` - 1
    tokens before it.

    q [T, Hq, D]; k, v [T, Hkv, D]; cu_seqlens [S+1] int32. Returns [T, Hq, D].
    """
    seen = (-1 if window is None else window - 1, 0)
    kernel = _flash_attn if _has_flash_attn() else _torch
    return kernel(q, k, v, cu_seqlens, longest, scale, seen)


def register() -> None:
    """Make the kernels' operators known to torch, which importing them does."""
    _has_flash_attn()
    importlib.import_module("torch.nn.attention.varlen")


@cache
def _has_flash_attn() -> bool:
    """Other releases have a package of this name without the function."""
    if importlib.util.find_spec("flash_attn") is None:
        return False
    try:
        return hasattr(importlib.import_module("flash_attn"), "flash_attn_varlen_func")
    except ImportError as error:
        logger.warning("flash-attn is of another torch or CUDA, torch's kernel is used: %s", error)
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
    # Shared key heads need no word in torch 2.11, whose function has no such argument.
    options = {"enable_gqa": q.shape[1] != k.shape[1]} if _has_enable_gqa(varlen_attn) else {}
    out: Tensor = varlen_attn(
        q, k, v, cu, cu, longest, longest, scale=scale, window_size=seen, **options
    )
    return out


@cache
def _has_enable_gqa(function: Callable[..., Tensor]) -> bool:
    return "enable_gqa" in inspect.signature(function).parameters
