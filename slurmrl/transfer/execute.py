"""Execution of a move: the bytes go from source storages to target storages, over NCCL or gloo."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.errors import LayoutError
from slurmrl.layout.box import Box
from slurmrl.layout.shard import Shard
from slurmrl.transfer.plan import Cargo, MovePlan, Segment
from slurmrl.transfer.regions import PlacedLayout

Storages = Mapping[str, Tensor]
"""A rank's tensors by storage name; each is contiguous."""


class Holdings:
    """One rank's part of a layout, and the tensors that hold it."""

    def __init__(self, placed: PlacedLayout, rank: int, storages: Storages) -> None:
        self._shards: dict[str, list[Shard]] = defaultdict(list)
        if rank in placed.ranks:
            for shard in placed.layout.held_by(placed.ranks.index(rank)):
                self._shards[shard.name].append(shard)
        self._storages = storages

    def views(self, name: str, box: Box) -> list[Tensor]:
        """The box's elements in every shard that contains them, as strided views."""
        return [self._view(shard, box) for shard in self._shards[name] if shard.box.contains(box)]

    def _view(self, shard: Shard, box: Box) -> Tensor:
        try:
            storage = self._storages[shard.storage].detach()
        except KeyError:
            raise LayoutError(f"no storage '{shard.storage}' of tensor '{shard.name}'") from None
        offset = storage.storage_offset() + shard.offset_of(box)
        last = sum((n - 1) * step for n, step in zip(box.size, shard.strides, strict=True))
        if not storage.is_contiguous() or shard.offset_of(box) + last >= storage.numel():
            raise LayoutError(
                f"{box} of tensor '{shard.name}' exceeds its storage '{shard.storage}' of "
                f"{storage.numel()} elements"
            )
        return storage.as_strided(box.size, shard.strides, offset)


@dataclass(frozen=True)
class _Leg:
    """A segment on one link of its chain, at this rank's end."""

    number: int
    segment: Segment
    link: int


class Mover:
    """One rank's part of a move, ready to be executed any number of times.

    ``group`` contains all ranks of the move and is used by nothing else meanwhile. ``eta`` makes
    the target a moving average: ``eta source + (1 - eta) target``, computed in float32 (float64
    where either is).
    """

    def __init__(
        self,
        plan: MovePlan,
        rank: int,
        source: Holdings,
        target: Holdings,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        eta: float = 1.0,
    ) -> None:
        self.plan = plan
        self._rank = rank
        self._source = source
        self._target = target
        self._group = group
        self._device = device
        self._eta = eta
        self._sends: dict[int, list[_Leg]] = defaultdict(list)
        self._receives: dict[int, list[_Leg]] = defaultdict(list)
        for number, segment in enumerate(plan.segments):
            if rank in segment.chain:
                place = segment.chain.index(rank)
                if place + 1 < len(segment.chain):
                    leg = _Leg(number, segment, place)
                    self._sends[segment.slot + place].append(leg)
                if place:
                    leg = _Leg(number, segment, place - 1)
                    self._receives[segment.slot + place - 1].append(leg)

    @torch.no_grad()
    def run(self) -> None:
        """Execute the move. Every rank of the plan calls it; each may return when its own part is
        done."""
        for cargo in self.plan.local.get(self._rank, ()):
            (source, *_), targets = self._views(cargo)
            for target in targets:
                self._write(target, source)
        arrived: dict[int, Tensor] = {}
        for slot in sorted({*self._sends, *self._receives}):
            arrived = self._slot(slot, arrived)

    def start(self) -> Future[None]:
        """Execute the move in a thread of its own. The future has the thread's exception."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="slurmrl-move")
        future = pool.submit(self.run)
        pool.shutdown(wait=False)
        return future

    def _slot(self, slot: int, arrived: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Send and receive what a slot is for. ``arrived`` are the buffers of the slot before,
        of which some are passed on; those that this slot receives are returned."""
        operations: list[dist.P2POp] = []
        received: list[tuple[_Leg, Tensor]] = []
        for leg in self._sends[slot]:
            passed_on = arrived.get(leg.number)
            buffer = self._packed(leg.segment) if passed_on is None else passed_on
            peer = leg.segment.chain[leg.link + 1]
            operations.append(dist.P2POp(dist.isend, buffer, peer, self._group, tag=leg.number))
        for leg in self._receives[slot]:
            buffer = torch.empty(leg.segment.bytes, dtype=torch.uint8, device=self._device)
            received.append((leg, buffer))
            peer = leg.segment.chain[leg.link]
            operations.append(dist.P2POp(dist.irecv, buffer, peer, self._group, tag=leg.number))
        operations.sort(key=lambda operation: operation.tag)  # the same order at both ends
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for leg, buffer in received:
            for cargo, elements in _cargo(leg.segment, buffer):
                for target in self._target.views(cargo.name, cargo.box):
                    self._write(target, elements)
        return {leg.number: buffer for leg, buffer in received}

    def _packed(self, segment: Segment) -> Tensor:
        buffer = torch.empty(segment.bytes, dtype=torch.uint8, device=self._device)
        for cargo, elements in _cargo(segment, buffer):
            elements.copy_(self._source.views(cargo.name, cargo.box)[0])
        return buffer

    def _views(self, cargo: Cargo) -> tuple[list[Tensor], list[Tensor]]:
        return (
            self._source.views(cargo.name, cargo.box),
            self._target.views(cargo.name, cargo.box),
        )

    def _write(self, target: Tensor, elements: Tensor) -> None:
        if self._eta == 1.0:
            target.copy_(elements)
            return
        wide = torch.promote_types(torch.promote_types(target.dtype, elements.dtype), torch.float32)
        elements = elements.to(target.device, wide)
        target.copy_(target.to(wide).lerp_(elements, self._eta))


def _cargo(segment: Segment, buffer: Tensor) -> Iterator[tuple[Cargo, Tensor]]:
    """The boxes in a segment's buffer."""
    offset = 0
    for cargo in segment.cargo:
        flat = buffer[offset : offset + cargo.bytes].view(getattr(torch, cargo.dtype))
        yield cargo, flat.view(cargo.box.size)
        offset += cargo.bytes
