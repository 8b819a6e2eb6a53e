"""A fingerprint of a model's weights that ranks with parts of them compute together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.layout.box import Box, Index, blocks
from slurmrl.layout.shard import row_major
from slurmrl.ops.splitmix import hash64, mix
from slurmrl.transfer.verify import BITS, BLOCK


class Fingerprint:
    """The sum over all elements of their bits times an odd random number, modulo 2^64. The number
    is a function of the parameter's name and the element's place. So the sum depends neither on the
    parts in which weights are added nor on their order, and another element, place or type gives
    another sum."""

    def __init__(self, shapes: Mapping[str, Index], device: torch.device) -> None:
        """``shapes``: of whole parameters. Computes on ``device``, block by block."""
        self._shapes = shapes
        self._total = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, name: str, box: Box, values: Tensor) -> None:
        """Count a box of a parameter, once; ``values`` has the box's size."""
        salt, device = hash64(name), self._total.device
        for block in blocks(Box.whole(box.size), BLOCK):
            start = tuple(map(sum, zip(box.start, block.start, strict=True)))
            places = _places(self._shapes[name], Box(start, block.size), device)
            part = values[block.slices].to(device).reshape(-1)
            bits = part.view(BITS[part.element_size()])
            self._total += (mix(places ^ salt) | 1).mul_(bits).sum()

    def add_up(self, group: dist.ProcessGroup) -> None:
        """Sum over the ranks of a group. Collective."""
        dist.all_reduce(self._total, group=group)

    def __str__(self) -> str:
        return f"{int(self._total) % 2**64:016x}"


def _places(shape: Index, box: Box, device: torch.device) -> Tensor:
    """The flat index in a tensor of ``shape`` of each element of a box."""
    places = torch.zeros((), dtype=torch.int64, device=device)
    for stride, start, size in zip(row_major(shape), box.start, box.size, strict=True):
        along = torch.arange(start, start + size, device=device) * stride
        places = places.unsqueeze(-1) + along
    return places.reshape(-1)
