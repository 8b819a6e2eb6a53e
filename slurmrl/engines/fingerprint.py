"""The fingerprint of a model's weights that ranks with parts of them compute together."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.models.adapters import shown, summand
from slurmrl.tensors.layout import Box, Index, blocks
from slurmrl.tensors.transfer.execute import BITS, BLOCK


class Fingerprint:
    """See `slurmrl.models.adapters`."""

    def __init__(self, shapes: Mapping[str, Index], device: torch.device) -> None:
        """``shapes``: of whole parameters. Computes on ``device``, block by block."""
        self._shapes = shapes
        self._total = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, name: str, box: Box, values: Tensor) -> None:
        """Count a box of a parameter, once; ``values`` has the box's size."""
        device = self._total.device
        count = partial(torch.arange, device=device)
        for block in blocks(Box.whole(box.size), BLOCK):
            start = tuple(map(sum, zip(box.start, block.start, strict=True)))
            part = values[block.slices].to(device).reshape(-1)
            bits = part.view(BITS[part.element_size()])
            place = Box(start, block.size)
            self._total += summand(name, self._shapes[name], place, bits, count)

    def add_up(self, group: dist.ProcessGroup) -> None:
        """Sum over the ranks of a group. Collective."""
        dist.all_reduce(self._total, group=group)

    def __str__(self) -> str:
        return shown(int(self._total))
