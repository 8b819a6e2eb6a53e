"""The storage of parameters in the tensors of a model folder's files. Torch-free.

Most parameters are stored as a tensor of the same name. A mixture of experts has a tensor for each
row of a parameter; other models store several parameters in one tensor, or transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from slurmrl.tensors.checkpoint.tensors import TensorEntry
from slurmrl.tensors.layout.box import Box, Index
from slurmrl.tensors.layout.copy import Array
from slurmrl.tensors.layout.layout import TensorSpec


@dataclass(frozen=True)
class TensorSlice:
    """One parameter, or one row of it, in a file's tensor."""

    tensor: str
    row: int | None = None
    """The row of the parameter; None for the whole parameter."""
    transposed: bool = False
    first: int = 0
    """Its start in the last dim of the tensor."""

    def box(self, parameter: Box) -> Box:
        """The box of the tensor that stores a box of the parameter."""
        start, size = list(parameter.start), list(parameter.size)
        if self.row is not None:
            start, size = start[1:], size[1:]
        if self.transposed:
            start, size = start[::-1], size[::-1]
        if self.first:
            start[-1] += self.first
        return Box(tuple(start), tuple(size))

    def parameter(self, stored: Box) -> Box:
        """The box of the parameter that a box of the tensor stores: the inverse of `box`."""
        start, size = list(stored.start), list(stored.size)
        if self.first:
            start[-1] -= self.first
        if self.transposed:
            start, size = start[::-1], size[::-1]
        if self.row is not None:
            start, size = [self.row, *start], [1, *size]
        return Box(tuple(start), tuple(size))

    def of(self, shape: Index) -> Box:
        """The box of a parameter of ``shape`` that it stores."""
        if self.row is None:
            return Box.whole(shape)
        return Box((self.row, *(0 for _ in shape[1:])), (1, *shape[1:]))


Storage = Callable[[str, Index], tuple[TensorSlice, ...]]
"""Name and shape of a parameter -> the slices that store it."""


def by_name(name: str, shape: Index) -> tuple[TensorSlice, ...]:
    """Every parameter is stored as a tensor of the same name."""
    return (TensorSlice(name),)


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file, and the parameters or rows that it stores."""

    spec: TensorSpec
    shards: tuple[tuple[str, TensorSpec, TensorSlice], ...]


def file_tensors(
    parameters: Iterable[tuple[str, TensorSpec]], storage: Storage
) -> dict[str, FileTensor]:
    """The tensors that these parameters are stored in, by name, in the parameters' order."""
    slices: dict[str, list[tuple[str, TensorSpec, TensorSlice]]] = {}
    for name, spec in parameters:
        for stored in storage(name, spec.shape):
            slices.setdefault(stored.tensor, []).append((name, spec, stored))
    return {tensor: _file_tensor(shards) for tensor, shards in slices.items()}


def _file_tensor(shards: list[tuple[str, TensorSpec, TensorSlice]]) -> FileTensor:
    shards.sort(key=lambda shard: shard[2].first)
    boxes = [stored.box(stored.of(spec.shape)) for _, spec, stored in shards]
    shape = boxes[0].size if len(boxes) == 1 else (*boxes[0].size[:-1], boxes[-1].stop[-1])
    return FileTensor(TensorSpec(shape, shards[0][1].dtype), tuple(shards))


def file_entries(
    parameters: Iterable[tuple[str, TensorSpec]],
    read: Callable[[str, Box], Array],
    storage: Storage,
) -> list[TensorEntry]:
    """The tensors to write for these parameters; ``read`` provides a box of a parameter on
    demand."""
    return [
        TensorEntry(name, tensor.spec, partial(assembled, read, tensor))
        for name, tensor in file_tensors(parameters, storage).items()
    ]


def assembled(read: Callable[[str, Box], Array], tensor: FileTensor) -> Array:
    """The elements of a file's tensor, of which ``read`` provides those of its parameters."""
    arrays = []
    for name, spec, stored in tensor.shards:
        box = stored.of(spec.shape)
        values = read(name, box).reshape(box.size if stored.row is None else box.size[1:])
        arrays.append(values.T if stored.transposed else values)
    whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, -1)
    return np.asarray(whole, order="C")  # (ascontiguousarray would add a dim to a scalar)
