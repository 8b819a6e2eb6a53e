"""Comparison of both sides after a move: every copy of an element must have the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.errors import MoveError
from slurmrl.tensors.layout.box import Box, blocks
from slurmrl.tensors.transfer.execute import Holdings
from slurmrl.tensors.transfer.plan import wire_dtype
from slurmrl.tensors.transfer.regions import PlacedLayout, Region, regions

BLOCK = 1 << 20
"""Elements that are converted and widened at a time."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of an element's bytes."""


@torch.no_grad()
def verify_move(
    source: PlacedLayout,
    target: PlacedLayout,
    rank: int,
    held: Holdings,
    taken: Holdings,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Compare the checksums of all replicas in the source and in the target, box by box, each in
    the dtype in which it travelled. Collective over ``group``.

    The comparison follows the layouts, not the plan of the move. It holds for moves that replace
    the target, not for moving averages.

    :raises LayoutError: an element of the target is on no rank.
    :raises MoveError: on every rank, if any replica differs.
    """
    target.layout.check()
    found = list(regions(source, target))
    # the first holder's checksum of each region is what all others must have
    expected = torch.zeros(len(found), dtype=torch.int64)
    own: list[tuple[int, str, Tensor]] = []
    for number, region in enumerate(found):
        for side, value in _checksums(region, rank, source, target, held, taken):
            own.append((number, side, value))
            if side == "source" and rank == region.holders[0]:
                expected[number] = value
    expected = _summed(expected, group, device)
    wrong = [(found[number], side) for number, side, value in own if int(value) != expected[number]]
    failed = _summed(torch.tensor([bool(wrong)], dtype=torch.int64), group, device)
    if wrong:
        region, side = wrong[0]
        raise MoveError(
            f"after the move, {region.box} of tensor '{region.name}' on rank {rank} of the {side} "
            f"differs from rank {region.holders[0]} of the source; {len(wrong)} boxes of this rank "
            "differ"
        )
    if failed.any():
        raise MoveError(f"after the move, tensors differ on {int(failed)} other ranks")


def _checksums(
    region: Region,
    rank: int,
    source: PlacedLayout,
    target: PlacedLayout,
    held: Holdings,
    taken: Holdings,
) -> Iterator[tuple[str, Tensor]]:
    """The checksum of every replica of a region on this rank."""
    specs = (side.layout.tensors[region.name] for side in (source, target))
    dtype = getattr(torch, wire_dtype(region.name, *specs))
    for name, ranks, holdings in (
        ("source", region.holders, held),
        ("target", region.takers, taken),
    ):
        if rank in ranks:
            for view in holdings.views(region.name, region.box):
                yield name, checksum(view, dtype)


def checksum(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of (2i + 1) times the bits of the i-th element in ``dtype``, modulo 2^64: int64 [].
    It changes if elements change, or change places."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    first = 0
    for box in blocks(Box.whole(tuple(values.shape)), BLOCK):
        block = values[box.slices].to(dtype).reshape(-1)
        weights = torch.arange(first, first + box.count, device=values.device).mul_(2).add_(1)
        bits = block.view(BITS[block.element_size()])
        total += weights.mul_(bits).sum()
        first += box.count
    return total


def _summed(values: Tensor, group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """The sum over the group's ranks, on the host."""
    values = values.to(device)
    dist.all_reduce(values, group=group)
    return values.cpu()
