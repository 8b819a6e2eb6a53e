"""Host memory for tensors: page-locked copies, freed device memory, tensors of weight versions.

Every tensor of a version's files has one owner among the ranks that have a part of it, so that all
ranks write at the same time. A move fills the owners' tensors in host memory, in the type and form
of the files.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from itertools import cycle
from math import prod
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.errors import UsageError
from slurmrl.models.hf import as_array
from slurmrl.tensors.checkpoint.export import EXACT, FLOATS
from slurmrl.tensors.checkpoint.tensors import (
    FileTensor,
    Storage,
    TensorEntry,
    TensorSlice,
    file_tensors,
)
from slurmrl.tensors.layout import Box, HeldBox, Holders, Layout, TensorSpec
from slurmrl.tensors.transfer.execute import BoxCopies, Holdings, Mover, Storages
from slurmrl.tensors.transfer.plan import PlacedLayout, plan_move

ALIGNMENT = 64
"""Alignment of each copy in bytes, as in torch's allocations."""
ROUNDS_BEFORE = "2.13"
PORTABLE = 1
"""cudaHostRegisterPortable: all CUDA contexts treat the memory as page-locked."""
Specs: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Mapping from a tensor's name to its shape and type."""


def lock_sizes_as_they_are() -> None:
    """Stop torch's allocator of page-locked memory from rounding up sizes above 1 MiB.

    By default, the allocator rounds sizes up to powers of two. FSDP allocates the weights and
    gradients of ``cpu_offload`` with this allocator. Before torch 2.13, rounding cannot be stopped;
    ``plan`` accounts for it.
    """
    if torch.__version__ >= ROUNDS_BEFORE:
        torch._C._accelerator_setAllocatorSettings("pinned_max_round_threshold_mb:1")


class HostBuffer:
    """``size`` bytes of host memory, page-locked if ``locked`` until this object is deleted.

    Tensors that view ``bytes`` stay valid after the deletion. torch's allocator of page-locked
    memory is not used, because it rounds each allocation up to a power of two, which nearly doubles
    the memory of large models.
    """

    def __init__(self, size: int, *, locked: bool) -> None:
        try:
            memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"cannot allocate {size} bytes of host memory: {error}") from error
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        if locked:
            address = self.bytes.data_ptr()
            _lock(address, len(memory))
            # The finalizer's reference keeps the memory mapped until it is unlocked.
            weakref.finalize(self, _unlock, address, memory).atexit = False


def _lock(address: int, size: int) -> None:
    code = _cudart().cudaHostRegister(address, size, PORTABLE)
    if int(code):
        raise MemoryError(
            f"cannot page-lock {size / 2**30:.1f} GiB of host memory for copies of weights and "
            f"optimizer state (CUDA error {int(code)}): raise cluster.mem_per_worker, or set "
            "checkpoint.asynchronous to false, which needs no copies"
        )


def _unlock(address: int, memory: mmap.mmap) -> None:
    _cudart().cudaHostUnregister(address)
    del memory


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class HostTensors(dict[str, Tensor]):
    """Named tensors of given shapes and types in one buffer, which is zero at first."""

    def __init__(self, specs: Specs, *, locked: bool) -> None:
        sizes = {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in specs.items()}
        steps = {name: -(-size // ALIGNMENT) * ALIGNMENT for name, size in sizes.items()}
        self._buffer = HostBuffer(sum(steps.values()), locked=locked)
        offset = 0
        for name, (shape, dtype) in specs.items():
            own = self._buffer.bytes[offset : offset + sizes[name]]
            self[name] = own.view(dtype).view(shape)
            offset += steps[name]


class HostCopies:
    """Copies of tensors in one reused buffer.

    The buffer is page-locked for tensors of a GPU, which makes copying fast.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors. The next call overwrites the result."""
        if (specs := _specs(tensors)) != _specs(self._copies):
            self._copies = {}  # free the old copies before allocating new ones
            locked = any(tensor.is_cuda for tensor in tensors.values())
            self._copies = HostTensors(specs, locked=locked)
        for name, tensor in tensors.items():
            self._copies[name].copy_(tensor, non_blocking=tensor.is_cuda)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()
        return dict(self._copies)


def _specs(tensors: Mapping[str, Tensor]) -> Specs:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


class Offload:
    """Storages whose contents move to host memory between ``take`` and ``give``."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._taken = False
        self._host = HostCopies()
        self._kept: list[tuple[torch.UntypedStorage, int]] = []
        self._copies: dict[str, Tensor] = {}
        """Mapping from a position in ``_kept`` to the copy in host memory."""

    def check(self) -> None:
        """Raise UsageError between ``take`` and ``give``."""
        if self._taken:
            raise UsageError(
                f"{self._role} is offloaded: its weights are in host memory until onload()"
            )

    def take(self, kept: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> None:
        """Copy ``kept`` to host memory and free the storages of ``kept`` and ``scratch``.

        `give` restores ``scratch`` as zeros. Do nothing after an earlier ``take``.
        """
        if self._taken:
            return
        self._taken = True
        seen: set[int] = set()
        contents: dict[str, Tensor] = {}
        for tensors, copied in ((kept, True), (scratch, False)):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                # Host memory that numpy uses cannot be freed, and need not be freed.
                if storage.data_ptr() in seen or not storage.nbytes() or not storage.resizable():
                    continue
                seen.add(storage.data_ptr())
                if copied:
                    contents[str(len(self._kept))] = _bytes(tensor)
                self._kept.append((storage, storage.nbytes()))
        self._copies = self._host.copy(contents)
        for storage, _ in self._kept:
            storage.resize_(0)
        if any(storage.device.type == "cuda" for storage, _ in self._kept):
            torch.cuda.empty_cache()  # Other processes on the GPU may need the memory.

    def give(self) -> None:
        """Undo ``take``."""
        for number, (storage, size) in enumerate(self._kept):
            storage.resize_(size)
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            if (copy := self._copies.get(str(number))) is None:
                whole.zero_()
            else:
                whole.copy_(copy)
        self._kept.clear()
        self._copies.clear()
        self._taken = False


def _bytes(tensor: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())


class OwnedTensors:
    """One rank's tensors of a weight version. All ranks make this object, with equal arguments."""

    def __init__(
        self,
        source: PlacedLayout,
        storage: Storage,
        dtype: str,
        *,
        hosts: Mapping[int, int],
        staging_bytes: int,
        group: dist.ProcessGroup,
        device: torch.device,
        copies: int,
    ) -> None:
        """Plan the move of weights to the ranks that own tensors of the files.

        ``source`` is the layout of the model's parameters, which ``storage`` maps to tensors of
        files. Floating-point tensors become ``dtype``, except for `EXACT` ones. ``hosts`` gives the
        host of each global rank. ``staging_bytes`` is the maximum number of bytes that a rank sends
        and receives at a time. ``copies`` is the number of results of `take` that are valid at the
        same time.
        """
        self._group, self._device = group, device
        files = file_tensors(source.layout.tensors.items(), storage)
        owners = owners_of(files, source.layout)
        self._source = source
        self._target = PlacedLayout(_whole(files, owners, source.layout, dtype), source.ranks)
        self._plan = plan_move(source, self._target, hosts=hosts, budget=staging_bytes)
        own = source.ranks.index(dist.get_rank())
        self._specs = {
            name: TensorSpec(file.spec.shape, converted(name, file.spec.dtype, dtype))
            for name, file in files.items()
            if owners[name] == own
        }
        shapes: Specs = {
            name: (spec.shape, getattr(torch, spec.dtype)) for name, spec in self._specs.items()
        }
        locked = device.type == "cuda"
        self._copies = cycle([HostTensors(shapes, locked=locked) for _ in range(copies)])
        self._box_copies = BoxCopies(device)

    def take(self, storages: Storages) -> list[TensorEntry]:
        """Return copies of the current weights that this rank owns; any thread may write them.

        ``storages`` are this rank's tensors of the source. Collective over the group.
        """
        tensors, rank = next(self._copies), dist.get_rank()
        Mover(
            self._plan,
            rank,
            Holdings(self._source, rank, storages),
            Holdings(self._target, rank, tensors),
            group=self._group,
            device=self._device,
            copies=self._box_copies,
        ).run()
        return [
            TensorEntry(name, spec, partial(as_array, tensors[name]))
            for name, spec in self._specs.items()
        ]


def converted(name: str, stored: str, wanted: str) -> str:
    """Return the type that a tensor of type ``stored`` has in a version."""
    return wanted if stored in FLOATS and not name.endswith(EXACT) else stored


def owners_of(files: Mapping[str, FileTensor], layout: Layout) -> dict[str, int]:
    """Return the rank that owns each tensor.

    The owner is the rank with the fewest bytes so far among the ranks that have a part of the
    tensor. Tensors on few ranks are assigned first, and large tensors before small tensors.
    """

    @lru_cache(maxsize=1024)  # many layers have the same holders
    def holding(holders: Holders, box: Box) -> frozenset[int]:
        parts = (part for part in holders.parts if part.box.intersect(box))
        return frozenset(rank for part in parts for rank in part.ranks)

    near = {
        tensor: frozenset[int]().union(
            *(holding(layout.holders[name], cut.of(spec.shape)) for name, spec, cut in file.shards)
        )
        for tensor, file in files.items()
    }
    used = [0] * layout.ranks
    found: dict[str, int] = {}
    for tensor in sorted(files, key=lambda name: (len(near[name]), -files[name].spec.bytes, name)):
        found[tensor] = min(near[tensor], key=lambda rank: (used[rank], rank))
        used[found[tensor]] += files[tensor].spec.bytes
    return found


def _whole(
    files: Mapping[str, FileTensor], owners: Mapping[str, int], source: Layout, dtype: str
) -> Layout:
    """Return the layout in which the owner of each tensor of the files has the whole tensor."""
    parts: dict[str, list[HeldBox]] = {name: [] for name in source.tensors}
    for tensor, file in files.items():
        for name, spec, cut in file.shards:
            parts[name].append(_part(owners[tensor], tensor, file, spec, cut))
    specs = {
        name: TensorSpec(spec.shape, converted(name, spec.dtype, dtype))
        for name, spec in source.tensors.items()
    }
    holders = {name: Holders(tuple(held)) for name, held in parts.items()}
    return Layout(specs, holders, source.ranks)


def _part(owner: int, tensor: str, file: FileTensor, spec: TensorSpec, cut: TensorSlice) -> HeldBox:
    """Return the place in the owner's tensor of the parameter box that ``cut`` selects."""
    offset, strides = cut.offset_and_strides(file.spec.shape, len(spec.shape))
    return HeldBox((owner,), cut.of(spec.shape), f"/{tensor}", offset, strides)
