"""Broadcast of what a call made, so that ranks with the same samples hold the same data.

The first of these ranks sends its result to the others, which drop their own.
"""

from __future__ import annotations

import json
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.data.sample import SequenceSample
from slurmrl.parallel.groups import ParallelContext

ALL = "data"
"""Name of the group of these ranks; a context without it has no such ranks."""


def share(sample: SequenceSample | None, context: ParallelContext) -> SequenceSample | None:
    """Return the first rank's ``sample`` on every rank of its group. Collective."""
    if ALL not in context.groups:
        return sample
    header = json.loads(_broadcast_bytes(json.dumps(_header(sample)).encode(), context))
    if header is None:
        return None
    buffer = torch.empty(0, dtype=torch.uint8)
    if sample is not None and context.is_leader:
        held = [_bytes(sample.tensor(key)) for key in header["tensors"]]
        buffer = torch.cat([part.to(context.device) for part in (buffer, *held)])
    sizes = [_size(spec) for spec in header["tensors"].values()]
    buffer = _broadcast(buffer, sum(sizes), context)
    data: dict[str, Tensor | None] = dict.fromkeys(header["lengths"])
    for (key, spec), (first, last) in zip(
        header["tensors"].items(), pairwise(accumulate(sizes, initial=0)), strict=True
    ):
        values = buffer[first:last].clone().view(getattr(torch, spec["dtype"]))
        device = "cpu" if spec["host"] else context.device
        data[key] = values.view(spec["shape"]).to(device)
    return SequenceSample(tuple(header["ids"]), header["lengths"], header["metadata"], data)


def _header(sample: SequenceSample | None) -> dict[str, Any] | None:
    if sample is None:
        return None
    return {
        "ids": sample.ids,
        "lengths": dict(sample.lengths),
        "metadata": dict(sample.metadata),
        "tensors": {
            key: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "host": tensor.device.type == "cpu",
            }
            for key, tensor in sample.data.items()
            if tensor is not None
        },
    }


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _size(spec: dict[str, Any]) -> int:
    item = torch.empty(0, dtype=getattr(torch, spec["dtype"])).element_size()
    return item * int(torch.Size(spec["shape"]).numel())


def _broadcast_bytes(content: bytes, context: ParallelContext) -> bytes:
    size = torch.tensor([len(content)], device=context.device)
    dist.broadcast(size, group=context.group(ALL), group_src=0)
    own = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(context.device)
    return bytes(_broadcast(own, int(size), context).cpu().numpy())


def _broadcast(own: Tensor, size: int, context: ParallelContext) -> Tensor:
    """Return the first rank's ``size`` bytes."""
    buffer = own if context.is_leader else own.new_empty(size, device=context.device)
    if size:
        dist.broadcast(buffer, group=context.group(ALL), group_src=0)
    return buffer
