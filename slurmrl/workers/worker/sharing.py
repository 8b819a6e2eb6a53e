"""Samples on their way between ranks: between two ranks, and from the first of the ranks with the
same part of a batch to the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.data.sample import SequenceSample
from slurmrl.ops.collectives import broadcast_bytes, broadcast_sized
from slurmrl.parallel.groups import ParallelContext

ALL = "data"
"""Name of the group of ranks with the same part; a context without it has no such ranks."""


class Mail:
    """Samples from rank to rank, through host memory. A rank sends without waiting; messages
    of one ``tag`` between two ranks arrive in the order in which they were sent."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """``group`` moves tensors in host memory between all ranks (gloo); ``device`` is where
        received tensors go."""
        self._group = group
        self._device = device
        self._sent: list[tuple[dist.Work, Tensor]] = []
        """What is on its way, with the tensors that must stay until it has arrived."""

    def send(self, sample: SequenceSample, to: int, tag: int) -> None:
        header = _header(sample)
        parts = [_bytes(sample.tensor(key)).cpu() for key in header["tensors"]]
        encoded = json.dumps(header).encode()
        content = torch.cat([torch.frombuffer(bytearray(encoded), dtype=torch.uint8), *parts])
        sizes = torch.tensor([len(encoded), content.numel()])
        for tensor in (sizes, content):
            work = dist.isend(tensor, to, group=self._group, tag=tag)
            assert work is not None, "this rank is in the group"
            self._sent.append((work, tensor))

    def receive(self, sender: int, tag: int) -> SequenceSample:
        sizes = torch.empty(2, dtype=torch.int64)
        dist.recv(sizes, sender, group=self._group, tag=tag)
        header_size, size = sizes.tolist()
        content = torch.empty(size, dtype=torch.uint8)
        dist.recv(content, sender, group=self._group, tag=tag)
        header = json.loads(bytes(content[:header_size].numpy()))
        return _unpacked(header, content[header_size:], self._device)

    def total(self, own: Tensor) -> Callable[[], Tensor]:
        """Begin to add up a tensor in host memory over all ranks, without waiting. Return a
        function that waits for the sum. Collective."""
        work = dist.all_reduce(own, group=self._group, async_op=True)
        assert work is not None, "this rank is in the group"
        self._sent.append((work, own))

        def wait() -> Tensor:
            work.wait()
            return own

        return wait

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


def share(sample: SequenceSample | None, context: ParallelContext) -> SequenceSample | None:
    """Return the first rank's ``sample`` on every rank of its group. Collective."""
    if ALL not in context.groups:
        return sample
    group, device = context.group(ALL), context.device
    header = json.loads(broadcast_bytes(json.dumps(_header(sample)).encode(), group, device))
    if header is None:
        return None
    buffer = torch.empty(0, dtype=torch.uint8, device=device)
    if sample is not None and context.is_leader:
        held = [_bytes(sample.tensor(key)) for key in header["tensors"]]
        buffer = torch.cat([part.to(device) for part in (buffer, *held)])
    size = sum(_size(spec) for spec in header["tensors"].values())
    return _unpacked(header, broadcast_sized(buffer, size, group), device)


def _header(sample: SequenceSample | None) -> Any:
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


def _unpacked(header: dict[str, Any], buffer: Tensor, device: torch.device) -> SequenceSample:
    """The sample whose tensors' bytes are in ``buffer``."""
    sizes = [_size(spec) for spec in header["tensors"].values()]
    data: dict[str, Tensor | None] = dict.fromkeys(header["lengths"])
    for (key, spec), (first, last) in zip(
        header["tensors"].items(), pairwise(accumulate(sizes, initial=0)), strict=True
    ):
        values = buffer[first:last].clone().view(getattr(torch, spec["dtype"]))
        data[key] = values.view(spec["shape"]).to("cpu" if spec["host"] else device)
    return SequenceSample(tuple(header["ids"]), header["lengths"], header["metadata"], data)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _size(spec: dict[str, Any]) -> int:
    item = torch.empty(0, dtype=getattr(torch, spec["dtype"])).element_size()
    return item * int(torch.Size(spec["shape"]).numel())
