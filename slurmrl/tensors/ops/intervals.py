"""Copies between a packed buffer and intervals of a flat buffer: gather, scatter, moving average.

Shapes: N intervals, E elements of a flat buffer, P elements in all intervals.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slurmrl.errors import UsageError
from slurmrl.tensors.ops.arguments import FLOATS, OFFSETS, check_share, check_vector
from slurmrl.tensors.ops.native.loading import operators


@dataclass(frozen=True)
class Intervals:
    """Intervals of a flat buffer, as tensors on a device, for many copies."""

    starts: Tensor
    """[N] int64: first element of each interval."""
    offsets: Tensor
    """[N+1] int64: start of each interval in the packed buffer, then P."""
    total: int
    """P, the total number of elements."""
    stop: int
    """Maximum end of an interval; 0 without intervals."""
    disjoint: bool
    """Whether no two intervals overlap."""

    @staticmethod
    def of(
        pairs: Tensor | Iterable[tuple[int, int]], device: torch.device | str = "cpu"
    ) -> Intervals:
        """Return intervals of ``pairs`` (start, stop), half-open and packed in the given order.

        Adjacent intervals are merged, and empty intervals are dropped. ``pairs`` are read on the
        host. Raises UsageError for invalid pairs.
        """
        begin, end = _columns(pairs)
        keep = end > begin
        begin, end = begin[keep], end[keep]
        joined = torch.cat([torch.ones(1, dtype=torch.bool), begin[1:] != end[:-1]])[: len(begin)]
        starts = begin[joined]
        stops = end[torch.cat([joined[1:], torch.ones(1, dtype=torch.bool)])[: len(end)]]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), (stops - starts).cumsum(0)])
        order = starts.argsort()
        disjoint = bool((starts[order][1:] >= stops[order][:-1]).all())
        return Intervals(
            starts=starts.to(device),
            offsets=offsets.to(device),
            total=int(offsets[-1]),
            stop=int(stops.max()) if len(stops) else 0,
            disjoint=disjoint,
        )

    def check(self, name: str, flat: Tensor) -> None:
        """Raise UsageError unless ``flat`` is contiguous, long enough and on the same device."""
        if flat.dim() != 1 or not flat.is_contiguous():
            raise UsageError(
                f"{name} must be 1-D and contiguous, not of shape {list(flat.shape)} with strides "
                f"{list(flat.stride())}"
            )
        if flat.shape[0] < self.stop:
            raise UsageError(
                f"intervals end at element {self.stop}, but {name} has {flat.shape[0]} elements"
            )
        if flat.device != self.starts.device:
            raise UsageError(f"intervals are on {self.starts.device}, but {name} on {flat.device}")


def gather(source: Tensor, intervals: Intervals, dtype: torch.dtype | None = None) -> Tensor:
    """Return the concatenated elements of the intervals [P], converted to ``dtype`` if it is set.

    Differentiable in source [E]. Only floating-point dtypes can be converted.
    """
    intervals.check("source", source)
    target = source.dtype if dtype is None else dtype
    _check_conversion("source", source.dtype, "dtype", target)
    packed: Tensor = _gather(source, intervals.starts, intervals.offsets, intervals.total, target)
    return packed


def scatter(target: Tensor, intervals: Intervals, packed: Tensor, eta: float = 1.0) -> None:
    """Write packed elements [P] to the intervals of ``target`` [E], in place.

    With eta < 1, the target becomes the moving average ``eta packed + (1 - eta) target``. The sum
    is computed in float64 if either tensor is float64, else in float32. Floating-point dtypes are
    converted. There is no gradient. Raises UsageError for invalid arguments.
    """
    intervals.check("target", target)
    check_vector("packed", packed, intervals.total, (packed.dtype,), target.device)
    check_share("eta", eta)
    _check_conversion("packed", packed.dtype, "target", target.dtype)
    if eta != 1.0 and target.dtype not in FLOATS:
        raise UsageError(f"eta must be 1 for a target of {target.dtype}, not {eta}")
    if not intervals.disjoint:
        raise UsageError("intervals must not overlap if they are written to")
    if torch.is_grad_enabled() and (target.requires_grad or packed.requires_grad):
        raise UsageError("scatter has no gradient: detach target and packed, or use torch.no_grad")
    _scatter(target, packed, intervals.starts, intervals.offsets, eta)


@torch.library.custom_op("slurmrl::gather_intervals", mutates_args=())
def _gather(
    source: Tensor, starts: Tensor, offsets: Tensor, total: int, dtype: torch.dtype
) -> Tensor:
    native = operators(source.device, total)
    if native is None:
        return gather_reference(source, starts, offsets, total, dtype)
    packed = torch.empty(total, dtype=dtype, device=source.device)
    native.copy(source, packed, starts, offsets, total, 1.0, True)
    return packed


@_gather.register_fake
def _(source: Tensor, starts: Tensor, offsets: Tensor, total: int, dtype: torch.dtype) -> Tensor:
    return source.new_empty(total, dtype=dtype)


@torch.library.custom_op("slurmrl::scatter_intervals", mutates_args={"target"})
def _scatter(target: Tensor, packed: Tensor, starts: Tensor, offsets: Tensor, eta: float) -> None:
    if _share_memory(target, packed):
        raise UsageError("packed must not share memory with target")
    native = operators(target.device, len(packed))
    if native is None:
        scatter_reference(target, packed, starts, offsets, eta)
    else:
        native.copy(packed.contiguous(), target, starts, offsets, len(packed), eta, False)


@_scatter.register_fake
def _(target: Tensor, packed: Tensor, starts: Tensor, offsets: Tensor, eta: float) -> None:
    return None


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    source, starts, offsets, ctx.total, _ = inputs
    ctx.save_for_backward(starts, offsets)
    ctx.elements, ctx.dtype = len(source), source.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs. A source element gets the sum over its copies."""
    starts, offsets = ctx.saved_tensors
    places = _elements(starts, offsets, ctx.total)
    grad_source = grad.new_zeros(ctx.elements).index_add(0, places, grad).to(ctx.dtype)
    return grad_source, None, None, None, None


_gather.register_autograd(_backward, setup_context=_keep)


def gather_reference(
    source: Tensor, starts: Tensor, offsets: Tensor, total: int, dtype: torch.dtype
) -> Tensor:
    """Return `gather` in pure torch."""
    return source[_elements(starts, offsets, total)].to(dtype)


def scatter_reference(
    target: Tensor, packed: Tensor, starts: Tensor, offsets: Tensor, eta: float
) -> None:
    """Compute `scatter` in pure torch."""
    places = _elements(starts, offsets, len(packed))
    if eta != 1.0:
        wide = torch.float64 if torch.float64 in (target.dtype, packed.dtype) else torch.float32
        packed = eta * packed.to(wide) + (1.0 - eta) * target[places].to(wide)
    target[places] = packed.to(target.dtype)


def _elements(starts: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Return the index [P] int64 in the flat buffer of each packed element."""
    shift = (starts - offsets[:-1]).repeat_interleave(offsets.diff(), output_size=total)
    return shift + torch.arange(total, device=starts.device)


def _columns(pairs: Tensor | Iterable[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    try:
        table = pairs if isinstance(pairs, Tensor) else torch.tensor(list(pairs))
    except (TypeError, ValueError) as error:
        raise UsageError(f"intervals must be pairs of integers: {error}") from error
    if table.numel() == 0:
        table = table.reshape(0, 2).long()
    if table.dim() != 2 or table.shape[1] != 2:
        raise UsageError(f"intervals must be pairs, not of shape {list(table.shape)}")
    if table.dtype not in OFFSETS:
        raise UsageError(f"intervals must be int32 or int64, not {table.dtype}")
    begin, end = table.to("cpu", torch.int64).unbind(1)
    wrong = ((begin < 0) | (end < begin)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise UsageError(
            f"intervals: pair {row} is ({int(begin[row])}, {int(end[row])}), but must be (start, "
            "stop) with 0 <= start <= stop"
        )
    return begin, end


def _check_conversion(
    from_name: str, source: torch.dtype, to_name: str, target: torch.dtype
) -> None:
    if source != target and not (source in FLOATS and target in FLOATS):
        raise UsageError(
            f"{from_name} is {source} and {to_name} {target}: only float32, float64, bfloat16 and "
            "float16 are converted into each other"
        )


def _share_memory(one: Tensor, other: Tensor) -> bool:
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    a, b = one.data_ptr(), other.data_ptr()
    return a < b + other.numel() * other.element_size() and b < a + one.numel() * one.element_size()
