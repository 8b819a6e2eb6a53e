"""Execution of a move: bytes go from source storages to target storages, over NCCL or gloo.

On GPUs, an interval kernel (`tensors.ops.intervals`) makes a strided copy or moving average with
one launch, accesses of 16 bytes and no temporary tensor. torch makes all other copies. After a
move, all copies of an element must have the same bits on both sides (`verify_move`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.errors import LayoutError, MoveError
from slurmrl.tensors.layout import Box, Index, Shard, blocks
from slurmrl.tensors.ops.intervals import Intervals, gather, scatter
from slurmrl.tensors.ops.native.loading import operators
from slurmrl.tensors.transfer.plan import (
    Cargo,
    MovePlan,
    PlacedLayout,
    Region,
    Segment,
    regions,
    wire_dtype,
)

Storages = Mapping[str, Tensor]
"""Mapping from a storage's name to a rank's contiguous tensor."""


BLOCK = 1 << 20
"""Number of elements that are converted at a time."""
SHORTEST_RUN = 256
"""Minimum bytes of adjacent elements for the kernels, which need 16 bytes for each interval."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type by element size in bytes."""


class Holdings:
    """One rank's part of a layout, and the tensors that store it."""

    def __init__(self, placed: PlacedLayout, rank: int, storages: Storages) -> None:
        self._shards: dict[str, list[Shard]] = defaultdict(list)
        if rank in placed.ranks:
            for shard in placed.layout.held_by(placed.ranks.index(rank)):
                self._shards[shard.name].append(shard)
        self._storages = storages

    def views(self, name: str, box: Box) -> list[Tensor]:
        """Return strided views of the box's elements, in every shard that contains them."""
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
    """A segment that this rank sends to or receives from ``peer``."""

    number: int
    segment: Segment
    peer: int


@dataclass(frozen=True)
class _Message:
    """Bytes that one rank sends to another."""

    cargo: tuple[Cargo, ...]
    bytes: Tensor
    copies: list[Tensor] | None = None
    """The box's other views, if the bytes are received directly into one view. None if the bytes
    are received into a buffer."""


Arrived = dict[int, list[_Message]]
"""Mapping from a segment's number to the received messages."""


@dataclass(frozen=True)
class _UnderWay:
    """The running operations of a slot."""

    works: list[tuple[dist.Work, list[_Message]]]
    """Operations, each with the messages that it receives."""
    arriving: Arrived
    operations: list[dist.P2POp]
    """Operations whose tensors must exist until the slot ends."""


class Mover:
    """One rank's part of a move, which can be executed several times.

    ``group`` contains all ranks of the move and is used for nothing else at that time. With ``eta``
    below 1, the target becomes a moving average: ``eta source + (1 - eta) target``, computed in
    float32, or in float64 if either tensor is float64. The movers of a plan can share ``copies``.
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
        copies: BoxCopies | None = None,
    ) -> None:
        self.plan = plan
        self._rank = rank
        self._source = source
        self._target = target
        self._group = group
        self._device = device
        self._eta = eta
        self._copies = copies or BoxCopies(device)
        self._sends: dict[int, list[_Leg]] = defaultdict(list)
        self._receives: dict[int, list[_Leg]] = defaultdict(list)
        for number, segment in enumerate(plan.segments):
            chain = segment.chain
            if rank in chain:
                place = chain.index(rank)
                if place + 1 < len(chain):
                    leg = _Leg(number, segment, chain[place + 1])
                    self._sends[segment.slot + place].append(leg)
                if place:
                    leg = _Leg(number, segment, chain[place - 1])
                    self._receives[segment.slot + place - 1].append(leg)

    @torch.no_grad()
    def run(self) -> None:
        """Execute the move. Collective over the plan's ranks; some may return before others."""
        arrived: Arrived = {}
        slots = sorted({*self._sends, *self._receives})
        for slot in slots:
            under_way = self._post(slot, arrived)
            if slot == slots[0]:
                self._copy_local()
            self._finish(under_way)
            following = {leg.number for leg in self._sends.get(slot + 1, ())}
            arrived = {n: found for n, found in under_way.arriving.items() if n in following}
            del under_way  # Free the slot's buffers before the next slot allocates.
        if not slots:
            self._copy_local()

    def _copy_local(self) -> None:
        for cargo in self.plan.local.get(self._rank, ()):
            source, *_ = self._source.views(cargo.name, cargo.box)
            for target in self._target.views(cargo.name, cargo.box):
                self._copies.write(target, source, self._eta)

    def _post(self, slot: int, arrived: Arrived) -> _UnderWay:
        """Begin the sends and receives of a slot.

        ``arrived`` has the data of the previous slot that this slot passes on.
        """
        operations: list[tuple[dist.P2POp, list[_Message]]] = []
        arriving: Arrived = {}
        for leg in self._receives.get(slot, ()):
            arriving[leg.number] = [self._landing(cargo) for cargo in leg.segment.messages()]
            for message in arriving[leg.number]:
                operations.append((self._operation(dist.irecv, message, leg), [message]))
        for leg in self._sends.get(slot, ()):
            messages = arrived.get(leg.number)
            if messages is None:
                messages = [self._packed(cargo) for cargo in leg.segment.messages()]
            operations += [(self._operation(dist.isend, message, leg), []) for message in messages]
        operations.sort(key=lambda entry: entry[0].tag)  # Both ends must post in the same order.
        posted = [operation for operation, _ in operations]
        works = dist.batch_isend_irecv(posted)
        received = [messages for _, messages in operations]
        if len(works) < len(operations):  # NCCL returns a single operation for all.
            received = [*([] for _ in works[1:]), list(itertools.chain.from_iterable(received))]
        return _UnderWay(list(zip(works, received, strict=True)), arriving, posted)

    def _finish(self, under_way: _UnderWay) -> None:
        for work, messages in under_way.works:
            work.wait()
            for message in messages:
                self._unpack(message)

    def _operation(self, kind: Any, message: _Message, leg: _Leg) -> dist.P2POp:
        return dist.P2POp(kind, message.bytes, leg.peer, self._group, tag=leg.number)

    def _packed(self, cargo: tuple[Cargo, ...]) -> _Message:
        """Return a message to send, with the source's own memory or a copy."""
        if len(cargo) == 1:
            view = self._source.views(cargo[0].name, cargo[0].box)[0]
            if self._travels(view, cargo[0]):
                return _Message(cargo, _bytes(view))
            packed = self._copies.packed(view, getattr(torch, cargo[0].dtype))
            if packed is not None:
                return _Message(cargo, _bytes(packed))
        message = self._empty(cargo)
        for item, elements in _boxes(message):
            elements.copy_(self._source.views(item.name, item.box)[0])
        return message

    def _landing(self, cargo: tuple[Cargo, ...]) -> _Message:
        """Return a message to receive, with the target's own memory or a buffer."""
        if len(cargo) == 1 and self._eta == 1.0:
            views = self._target.views(cargo[0].name, cargo[0].box)
            for number, view in enumerate(views):
                if self._travels(view, cargo[0]):
                    return _Message(cargo, _bytes(view), [*views[:number], *views[number + 1 :]])
        return self._empty(cargo)

    def _travels(self, view: Tensor, cargo: Cargo) -> bool:
        """Return whether elements have the same order and type in memory as in messages."""
        same = view.dtype == getattr(torch, cargo.dtype) and view.device == self._device
        return same and view.is_contiguous()

    def _empty(self, cargo: tuple[Cargo, ...]) -> _Message:
        count = sum(item.bytes for item in cargo)
        return _Message(cargo, torch.empty(count, dtype=torch.uint8, device=self._device))

    def _unpack(self, message: _Message) -> None:
        if message.copies == []:
            return
        for item, elements in _boxes(message):
            targets = message.copies
            for target in self._target.views(item.name, item.box) if targets is None else targets:
                self._copies.write(target, elements, self._eta)


def _boxes(message: _Message) -> Iterator[tuple[Cargo, Tensor]]:
    """Yield the boxes in a message and their elements."""
    offset = 0
    for cargo in message.cargo:
        flat = message.bytes[offset : offset + cargo.bytes].view(getattr(torch, cargo.dtype))
        yield cargo, flat.view(cargo.box.size)
        offset += cargo.bytes


def _bytes(view: Tensor) -> Tensor:
    return view.reshape(-1).view(torch.uint8)


class BoxCopies:
    """Copies of boxes within a rank.

    For each shape and strides, the object keeps intervals on the device; layers share them.
    """

    def __init__(self, device: torch.device, *, kernels: bool | None = None) -> None:
        """Use interval operators if ``kernels``; by default, if they are compiled for the GPU."""
        self._device = device
        self._kernels = kernels
        self._intervals: dict[tuple[Index, Index], Intervals] = {}

    def packed(self, view: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the elements [P] of a strided view as ``dtype``; None if no kernel can do so."""
        if view.is_contiguous() or not self._suits(view):
            return None
        return gather(_flat(view), self._of(view), dtype)

    def write(self, target: Tensor, elements: Tensor, eta: float) -> None:
        """Set ``target`` to ``eta elements + (1 - eta) target``.

        The sum is computed in float32, or in float64 if either tensor is float64.
        """
        plain = eta == 1.0 and target.is_contiguous()
        if not plain and elements.is_contiguous() and self._suits(target, elements):
            scatter(_flat(target), self._of(target), elements.reshape(-1), eta)
        elif eta == 1.0:
            if elements.is_cuda and not target.is_cuda:
                elements = elements.to(target.dtype)  # The GPU converts faster than the host.
            target.copy_(elements)
        else:
            _average(target, elements, eta)

    def _suits(self, view: Tensor, *others: Tensor) -> bool:
        if view.device.type != self._device.type or any(t.device != view.device for t in others):
            return False
        run, _ = _runs(tuple(view.shape), view.stride())
        long = run * view.element_size() >= SHORTEST_RUN
        return long and view.is_floating_point() and self._has_kernels()

    def _has_kernels(self) -> bool:
        if self._kernels is None:
            on_gpu = self._device.type == "cuda"
            self._kernels = on_gpu and operators(self._device, 0) is not None
        return self._kernels

    def _of(self, view: Tensor) -> Intervals:
        key = tuple(view.shape), view.stride()
        if key not in self._intervals:
            run, outer = _runs(*key)
            starts = torch.zeros(1, dtype=torch.int64)
            for length, step in outer:
                starts = (starts[:, None] + torch.arange(length) * step).reshape(-1)
            pairs = torch.stack([starts, starts + run], 1)
            self._intervals[key] = Intervals.of(pairs, view.device)
        return self._intervals[key]


def _flat(view: Tensor) -> Tensor:
    """Return the memory from the view's first element to its last element."""
    last = sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
    return view.as_strided((last + 1,), (1,))


def _runs(size: Index, strides: Index) -> tuple[int, list[tuple[int, int]]]:
    """Return the length of runs of adjacent elements, and (length, stride) of dims around the runs.

    The outermost dim is first.
    """
    run = 1
    outer: list[tuple[int, int]] = []
    for length, step in reversed([*zip(size, strides, strict=True)]):
        if not outer and (length == 1 or step == run):
            run *= length
        elif length > 1:
            outer.append((length, step))
    return run, outer[::-1]


def _average(target: Tensor, elements: Tensor, eta: float) -> None:
    wide = torch.promote_types(torch.promote_types(target.dtype, elements.dtype), torch.float32)
    for box in blocks(Box.whole(tuple(target.shape)), BLOCK):
        old = target[box.slices]
        new = elements[box.slices].to(old.device, wide)
        if old.dtype == wide:
            old.lerp_(new, eta)
        else:
            old.copy_(old.to(wide).lerp_(new, eta))


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
    """Compare the checksums of all replicas in the source and in the target, box by box.

    Each box is compared in the dtype in which it was sent. Collective over ``group``. The
    comparison follows the layouts, not the plan. Moving averages cannot be compared.

    Raises LayoutError if no rank has an element of the target, and MoveError on every rank if a
    replica differs.
    """
    target.layout.check()
    found = list(regions(source, target))
    # The checksum of each region must be equal at all of its holders.
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
    """Yield (side, checksum) of every replica of a region on this rank."""
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
    """Return the sum of (2i + 1) times the bits of element i in ``dtype``, modulo 2^64: int64 [].

    The sum changes if elements change or swap places.
    """
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
    """Return the sum over the group's ranks, in host memory."""
    values = values.to(device)
    dist.all_reduce(values, group=group)
    return values.cpu()
