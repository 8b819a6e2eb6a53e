"""Operations that would make the host wait for a GPU, counted on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import slurmrl
from slurmrl.tensors.ops import attention

OURS = str(Path(slurmrl.__file__).parent)
READS = (Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__)
"""Functions that copy a tensor to the host but are not operators on a CPU."""
SIZED_BY_VALUES = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::bincount",
    "aten::equal",
    "aten::_unique2",
}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


@contextmanager
def host_waits(on_device: Iterable[Tensor]) -> Iterator[list[str]]:
    """Collect the lines of slurmrl that would wait if the tensors ``on_device``, and all results
    computed from them, were on a GPU without shared prefixes.
    """
    waits: list[str] = []
    marked = {_address(tensor): tensor for tensor in on_device}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "prefix_attention_works", lambda: False)
        with _Functions(marked, waits), _Operators(marked, waits):
            yield waits


class _Operators(TorchDispatchMode):
    def __init__(self, marked: dict[int, Tensor], waits: list[str]) -> None:
        super().__init__()
        self._marked, self._waits = marked, waits

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        inputs = _tensors((args, kwargs))
        of_device = any(_address(tensor) in self._marked for tensor in inputs)
        if of_device and _reads_values(func.name().partition(".")[0], args, kwargs or {}):
            self._waits.append(f"{func.name()} at {_place()}")
        out = func(*args, **(kwargs or {}))
        if of_device:
            # (Kept tensors keep their addresses, so no other tensor gets them.)
            self._marked.update({_address(tensor): tensor for tensor in _tensors(out)})
        return out


class _Functions(TorchFunctionMode):
    def __init__(self, marked: dict[int, Tensor], waits: list[str]) -> None:
        super().__init__()
        self._marked, self._waits = marked, waits

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        read = func in READS and _address(args[0]) in self._marked
        # A tensor from Python numbers on a device is copied from pageable memory.
        copied = func is torch.tensor and isinstance(kwargs.get("device"), torch.device)
        if read or copied:
            self._waits.append(f"{func.__name__} at {_place()}")
        out = func(*args, **kwargs)
        if read and isinstance(out, Tensor):
            out = out.clone()  # the copy in host memory
            del self._marked[_address(out)]
        return out


def _reads_values(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    if name in INDEXING:
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return name in SIZED_BY_VALUES


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors with elements; all empty tensors have the same address."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.numel()]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place() -> str:
    """Return the innermost frame of slurmrl's code."""
    frame: Any = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "a test"
