"""How many tokens the key-value cache may hold: what its memory allows."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from slurmrl.errors import UsageError
from slurmrl.models.decoder import Decoder
from slurmrl.models.paged import cell_bytes
from slurmrl.models.parallel.split import Split
from slurmrl.rollouts.generation.native.schedule import Limits

SHARE = 0.8
"""Part of a GPU's free memory that the cache may use; the rest is for activations and logits."""
GIB = 2**30


def bounded(limits: Limits, decoder: Decoder) -> Limits:
    """The limits with ``cache_tokens`` from ``cache_bytes``, or on a GPU from its free memory.

    Without either, or with ``cache_tokens``, they are unchanged. All ranks of a decoder that is
    split get the same limits: they have as many pages as the GPU with the least free memory holds.

    Raises UsageError if not even one page fits.
    """
    device = decoder.head_weight().device
    if limits.cache_tokens is not None:
        return limits
    size, source = limits.cache_bytes, "the cache may use"
    if size is None and device.type == "cuda":
        free = _least(_free_bytes(device), decoder.split, device)
        size, source = int(SHARE * free), f"the free memory of {device} leaves it"
    if size is None:
        return limits
    cell = cell_bytes(decoder)
    pages = (size - cell) // (cell * limits.page_tokens)  # (a spare cell lies behind them)
    if pages < 1:
        needed = cell * (limits.page_tokens + 1) / GIB
        raise UsageError(
            f"a page of {limits.page_tokens} tokens of the key-value cache needs {needed:.3g} GiB, "
            f"but {source} {size / GIB:.3g} GiB: give it more memory, use fewer models on this "
            "device, or offload them"
        )
    return replace(limits, cache_tokens=pages * limits.page_tokens, cache_bytes=None)


def _least(size: int, split: Split, device: torch.device) -> int:
    """The least of the sizes of all ranks of a decoder. Collective over them."""
    if split.whole:
        return size
    least = torch.tensor(size, device=device)
    for axis in (split.tensor, split.context):
        if axis.size > 1:
            dist.all_reduce(least, dist.ReduceOp.MIN, group=axis.group)
    return int(least)


def _free_bytes(device: torch.device) -> int:
    """Memory that torch could allocate now."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
