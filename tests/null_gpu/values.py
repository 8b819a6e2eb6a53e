"""Values on the null GPU, whose kernels compute nothing. `SmallValues` computes small tensors on
the host, in the memory of the kernels' results. Lengths, masks, indices and the shapes that depend
on them are therefore real.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

SMALL_ELEMENTS = 2**15
"""Tensors of up to this many elements have values if they depend on such tensors only: room for a
number of each token, but not for weights and hidden states."""
INTEGER_ELEMENTS = 2**22
"""The same limit for tensors of integers and booleans. Other results of up to this size are zeros;
larger ones are undefined."""
WITH_ZEROS = ("addmm", "baddbmm", "bernoulli", "bmm", "exponential", "mm", "multinomial", "normal")
WITH_ZEROS += ("rand", "uniform")
"""Beginnings of the names of operations whose results are zeros: products, random numbers."""
WITHOUT_VALUES = ("empty", "new_empty", "resize_", "set_")
"""The same of operations that allocate only."""

aten = torch.ops.aten


class SmallValues(TorchDispatchMode):
    """Runs every operation on the null GPU, with its allocations, launches and waits, and then
    computes small results on the host.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it takes the call apart first
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return func(*args, **kwargs)
        if func is aten.normal_.default and not args[0].is_cuda and not _is_small(args[0]):
            return args[0]  # initial weights, whose values nobody reads
        if func is aten.repeat_interleave.Tensor and args[0].is_cuda:
            kwargs = _with_output_size(args[0], kwargs)
        if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
            indices = self._integers(args[1])
            args = (args[0], indices, *args[2:])
        result = func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        if any(isinstance(x, FakeTensor) for x in tensors) or not any(x.is_cuda for x in tensors):
            return result
        return _with_values(func, args, kwargs, result)

    def _integers(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return masks as the indices that the operation would compute, from zeros."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
            else:
                with self:
                    found += torch.nonzero(index).unbind(1)
        return found


def _with_output_size(repeats: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the call with a size.

    Without a size, the operation reads two numbers and rejects zeros.
    """
    if kwargs.get("output_size") is not None:
        return kwargs
    for _ in range(2):
        torch.cuda.current_stream().synchronize()
    return {**kwargs, "output_size": int(host(repeats).sum())}


def _with_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Return the result of a call on the null GPU. Small results have their values."""
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    mutable = func._schema.is_mutable
    if not mutable and _is_view(given, outputs):
        return result
    if not all(map(_is_small, given + outputs)) or func.__name__.startswith(WITHOUT_VALUES):
        values = None
    else:
        values = _on_host(func, args, kwargs)
    if values is None:
        if not mutable:
            for output in outputs:
                if output.numel() <= INTEGER_ELEMENTS and output.is_cuda:
                    host(output).zero_()
        return result
    return result if mutable else _placed(result, values)


def _is_view(given: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    storages = {x.untyped_storage().data_ptr() for x in given if x.numel()}
    return any(x.untyped_storage().data_ptr() in storages for x in outputs if x.numel())


def _is_small(tensor: Tensor) -> bool:
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.numel() <= (INTEGER_ELEMENTS if whole else SMALL_ELEMENTS)


def _on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operation on the host; return None if the host has no such operation. Operations that
    write to their arguments write to device memory, which the host can access here.
    """
    if func.namespace != "aten" or func.__name__.lstrip("_").startswith(WITH_ZEROS):
        return None
    try:
        return func(*tree_map(host, args), **tree_map(host, kwargs))
    except NotImplementedError:  # a kernel that only GPUs have
        return None


def host(value: Any) -> Any:
    """Return a CPU tensor over the same memory. Device arguments become the CPU."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if not isinstance(value, Tensor) or not value.is_cuda:
        return value
    if value.numel() == 0:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    sizes = zip(value.shape, value.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in sizes)
    memory = (ctypes.c_char * (span * value.element_size())).from_address(value.data_ptr())
    return torch.frombuffer(memory, dtype=value.dtype).as_strided(value.shape, value.stride())


def _placed(result: Any, values: Any) -> Any:
    """Return ``values`` in the memory of ``result``, or in new memory if the shape depends on
    values.
    """
    if isinstance(result, tuple | list):
        return type(result)(map(_placed, result, values))
    if not isinstance(result, Tensor):
        return values
    if not result.is_cuda:
        return values if isinstance(values, Tensor) else result
    if result.shape != values.shape:
        result = result.new_empty(values.shape, dtype=values.dtype)
    host(result).copy_(values)
    return result
