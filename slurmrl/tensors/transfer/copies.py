"""Copies between a strided box of a storage and elements that are packed in row-major order.

On GPUs an interval kernel of `tensors.ops.intervals` makes a copy that is strided, or one that is a
moving average: one launch, accesses of 16 bytes and no temporary tensor. torch makes all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slurmrl.tensors.layout.box import Box, Index, blocks
from slurmrl.tensors.ops.intervals import Intervals, gather, scatter
from slurmrl.tensors.ops.native.load import operators

BLOCK = 1 << 20
"""Elements of a moving average that torch widens at a time."""
SHORTEST_RUN = 256
"""Bytes of adjacent elements from which on the kernels are used: an interval takes 16 bytes."""


class BoxCopies:
    """The copies of a move. It keeps the intervals of each form of a box, which the layers of a
    model share, on the device."""

    def __init__(self, device: torch.device, *, kernels: bool | None = None) -> None:
        """``kernels``: whether to use the interval operators. Default: where compiled ones run on
        the GPU."""
        self._device = device
        self._kernels = kernels
        self._intervals: dict[tuple[Index, Index], Intervals] = {}

    def packed(self, view: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The elements of a strided view [P], converted; None if no kernel can pack them."""
        if view.is_contiguous() or not self._suits(view):
            return None
        return gather(_flat(view), self._of(view), dtype)

    def write(self, target: Tensor, elements: Tensor, eta: float) -> None:
        """Fill ``target`` with ``eta elements + (1 - eta) target``, computed in float32 (float64
        where either is)."""
        plain = eta == 1.0 and target.is_contiguous()
        if not plain and elements.is_contiguous() and self._suits(target, elements):
            scatter(_flat(target), self._of(target), elements.reshape(-1), eta)
        elif eta == 1.0:
            if elements.is_cuda and not target.is_cuda:
                elements = elements.to(target.dtype)  # the GPU converts faster than the host
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
    """The storage from the view's first element to its last one."""
    last = sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
    return view.as_strided((last + 1,), (1,))


def _runs(size: Index, strides: Index) -> tuple[int, list[tuple[int, int]]]:
    """The length of a run of adjacent elements, and the lengths and strides of the dims that
    repeat it, outermost first."""
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
