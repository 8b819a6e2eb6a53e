"""A lower bound of a GPU's seconds: bytes and floating-point operations of every dispatched
operation, divided by the rates of good kernels on an H100 SXM.

Operations in compiled regions and kernels called without torch's dispatcher are not counted.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tests.null_gpu.device import own_line
from tests.null_gpu.values import host

PEAK_FLOPS_PER_S: Final = 989e12
"""Dense bfloat16 products, by the data sheet."""
PRODUCT_FLOPS_PER_S: Final = 0.72 * PEAK_FLOPS_PER_S
"""What large products reach."""
ATTENTION_FLOPS_PER_S: Final = 0.45 * PEAK_FLOPS_PER_S
FLOAT32_FLOPS_PER_S: Final = 60e12
BYTES_PER_S: Final = 0.80 * 3.35e12
"""What elementwise kernels reach of the data sheet's 3.35 TB/s."""
LAUNCH_S: Final = 2e-6

BACKWARD_OF_ATTENTION: Final = 2.5
"""Products of attention's backward pass for each two of the forward pass: five."""
OVERWRITING: Final = ("copy_", "fill_", "zero_")
"""Operations that do not read the tensor that they write."""
GATHERING: Final = ("embedding", "gather", "index", "index_select")
"""Operations that read as much as they write, not all of their first argument."""
WITHOUT_KERNEL: Final = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
PRODUCTS: Final = {"mm": 0, "bmm": 0, "_grouped_mm": 0, "addmm": 1, "baddbmm": 1}
"""The place of the left factor among their arguments."""


@dataclass
class Cost:
    calls: int = 0
    bytes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0

    def add(self, size: float, flops: float, seconds: float) -> None:
        self.calls += 1
        self.bytes += size
        self.flops += flops
        self.seconds += seconds


class Roofline(TorchDispatchMode):
    """Enter it inside of `SmallValues`. ``costs`` are by (kind, file of slurmrl or operation)."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: dict[tuple[str, str], Cost] = defaultdict(Cost)

    @property
    def total(self) -> Cost:
        found = Cost()
        for cost in self.costs.values():
            found.add(cost.bytes, cost.flops, cost.seconds)
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it takes the call apart first
        result = func(*args, **kwargs)
        given = _on_gpu((args, kwargs))
        outputs = _on_gpu(result)
        if outputs or given:
            self._add(func, args, kwargs, result, given, outputs)
        return result

    def _add(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        given: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        name = func.overloadpacket.__name__
        size = _traffic(func, name, args, given, outputs)
        if not size:
            return
        kind, flops, rate = _work(func.overloadpacket, name, args, kwargs, result)
        seconds = max(size / BYTES_PER_S, flops / rate) + LAUNCH_S
        line = own_line(sys._getframe(2))
        where = line.rpartition(":")[0] if line else f"backward: {name}"
        self.costs[kind, where].add(size, flops, seconds)


def _on_gpu(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if type(x) in (Tensor, torch.nn.Parameter) and x.is_cuda]


def _traffic(
    func: Any, name: str, args: tuple[Any, ...], given: Sequence[Tensor], outputs: Sequence[Tensor]
) -> float:
    """Return the bytes that an operation reads and writes; 0 for views and allocations."""
    if name in WITHOUT_KERNEL:
        return 0.0
    mutable = func._schema.is_mutable
    starts = {x.untyped_storage().data_ptr() for x in given}
    if not mutable and outputs and all(x.untyped_storage().data_ptr() in starts for x in outputs):
        return 0.0
    if name in GATHERING:
        return 2.0 * sum(map(_bytes, outputs))
    written = outputs
    if mutable:
        changed = [
            arg.alias_info is not None and arg.alias_info.is_write for arg in func._schema.arguments
        ]
        written = _on_gpu([x for x, write in zip(args, changed, strict=False) if write]) or outputs
    read = given[1:] if name in OVERWRITING else given
    return float(sum(map(_bytes, read)) + sum(map(_bytes, written)))


def _bytes(tensor: Tensor) -> int:
    """Return the bytes without the repetitions of an expanded tensor."""
    if not tensor.numel():
        return 0
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else 1
    return size


def _work(
    packet: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[str, float, float]:
    """Return the kind of an operation, its floating-point operations, and their rate per second."""
    if name in ("_varlen_attn", "_varlen_attn_backward"):
        backward = name.endswith("backward")
        query, lengths = (args[1], args[6]) if backward else (args[0], args[3])
        flops = _causal_flops(query, lengths) * (BACKWARD_OF_ATTENTION if backward else 1.0)
        return "attention", flops, ATTENTION_FLOPS_PER_S
    if name in PRODUCTS:
        left = args[PRODUCTS[name]]
        exact = left.dtype == torch.float32
        flops = 2.0 * result.numel() * left.shape[-1]
        return "product", flops, FLOAT32_FLOPS_PER_S if exact else PRODUCT_FLOPS_PER_S
    formula: Callable[..., float] | None = flop_registry.get(packet)
    if formula is None:
        return "memory", 0.0, PRODUCT_FLOPS_PER_S
    return "attention", float(formula(*args, **kwargs, out_val=result)), ATTENTION_FLOPS_PER_S


def _causal_flops(query: Tensor, cu_seqlens: Tensor) -> float:
    """Return the operations of causal attention for query [T, H, D] and cu_seqlens [S+1]."""
    lengths = host(cu_seqlens).long().diff()
    pairs = float((lengths * (lengths + 1) // 2).sum())
    return 4.0 * query.shape[1] * query.shape[2] * pairs
