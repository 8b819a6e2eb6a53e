"""The tensors of one role in a checkpoint, whatever world size wrote them.

Rank r of n writes its arrays to ``<role>.<r>.safetensors``. Rank 0 also writes the layout of all
ranks' arrays, so that a reader opens only the files that it needs. Weights have their Hugging Face
names; optimizer moments have the moment's name, a slash, and the weight's name. A file may also
have arrays outside the layout (the rank's random state).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slurmrl.errors import CheckpointError, LayoutError
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.tensors.checkpoint.layouts import layout_name, layout_text, read_layout
from slurmrl.tensors.checkpoint.rank_files import KEY, RankFiles, ShardHeader, file_name
from slurmrl.tensors.checkpoint.tensors import (
    NUMPY_DTYPES,
    SavedFile,
    TensorEntry,
    write_file,
    write_tensors,
)
from slurmrl.tensors.layout.box import Box, blocks, cover
from slurmrl.tensors.layout.copy import Array, view
from slurmrl.tensors.layout.holders import Source, sources
from slurmrl.tensors.layout.layout import ITEM_BYTES, Layout, TensorSpec

BLOCK_BYTES = 16 * 2**20
"""What a reader has in memory beside the tensors that it fills."""


@dataclass(frozen=True)
class RoleSnapshot:
    """One rank's part of a role, ready to be written by any thread."""

    header: ShardHeader
    arrays: tuple[TensorEntry, ...]
    layout: Layout | None
    """The layout of all ranks' arrays, which rank 0 writes; other ranks need none."""
    frozen: str | None = None
    """Of adapters: the fingerprint of the weights that they belong to, which rank 0 writes."""

    def paths(self, directory: Path) -> list[Path]:
        """The files that `write` makes."""
        names = [file_name(self.header.role, self.header.rank)]
        if self.header.rank == 0:
            names.append(layout_name(self.header.role))
        return [directory / name for name in names]

    def write(self, directory: Path, *, calls: SystemCalls = REAL) -> list[SavedFile]:
        """Write the rank's files, durably. Raises EnvironmentFailure."""
        arrays, *more = self.paths(directory)
        metadata = {KEY: self.header.to_json()}
        saved = [write_tensors(arrays, self.arrays, metadata, calls=calls)]
        for path in more:
            assert self.layout is not None, "rank 0 has the layout"
            header = self.header
            text = layout_text(header.role, header.step, self.layout, self.frozen)
            saved.append(write_file(path, [memoryview(text)], calls=calls))
        return saved


class RoleCheckpoint:
    """Reader of one role. Raises CheckpointError or CorruptFileError if files are missing or
    inconsistent, EnvironmentFailure if they cannot be read."""

    def __init__(self, directory: Path, role: str) -> None:
        self.directory = directory
        self.role = role
        self._files = RankFiles(directory, role)
        self.step, self.layout, self.frozen = read_layout(directory, role, self._files)
        self._accessed_bytes = 0

    @property
    def ranks(self) -> int:
        """Number of ranks that wrote it."""
        return self.layout.ranks

    def check(self, tensors: Mapping[str, TensorSpec]) -> None:
        """Check that it has exactly these tensors. Raises CheckpointError for another model."""
        theirs = self.layout.tensors
        for name in (*tensors, *theirs):
            if theirs.get(name) != tensors.get(name):
                raise CheckpointError(
                    f"{self.directory}: {self.role}: '{name}' is {theirs.get(name)} in the "
                    f"checkpoint, {tensors.get(name)} in this run's model"
                )

    def has_array(self, rank: int, storage: str) -> bool:
        return self._files.has(rank, storage)

    def array(self, rank: int, storage: str) -> Array:
        """An array of one rank's file, flat; to be copied before another one is read."""
        return self._files.array(rank, storage)

    def read(self, name: str, box: Box | None = None) -> Array:
        """Read a box of a tensor (default: all of it) as a contiguous array, bfloat16 as its bits
        (uint16).

        Raises CheckpointError for an unknown or incomplete tensor.
        """
        spec = self._spec(name)
        box = box or Box.whole(spec.shape)
        target = np.empty(box.size, dtype=NUMPY_DTYPES[spec.dtype])
        for block, fill in self._blocks(name, box):
            index: tuple[Any, ...] = (*block.inside(box), ...)  # (a view of a scalar, too)
            fill(target[index])
        return target

    def blocks(self, name: str, box: Box) -> Iterator[tuple[Box, Array]]:
        """Read a box of a tensor in parts of at most `BLOCK_BYTES`, each with its values as from
        `read`. Raises as `read`."""
        dtype = NUMPY_DTYPES[self._spec(name).dtype]
        for block, fill in self._blocks(name, box):
            values = np.empty(block.size, dtype=dtype)
            fill(values)
            yield block, values

    def _blocks(self, name: str, box: Box) -> Iterator[tuple[Box, Callable[[Array], None]]]:
        """The parts of a box, each with the function that writes its values into an array."""
        spec = self._spec(name)
        with self._naming(name):
            parts = sources(self.layout.holders[name], box) if box.count else ()
        for block in blocks(box, BLOCK_BYTES // ITEM_BYTES[spec.dtype]):
            yield block, partial(self._fill, name, block, parts)

    def _fill(self, name: str, block: Box, parts: tuple[Source, ...], target: Array) -> None:
        taken, _ = cover(block, (box for _, box in parts))
        with self._naming(name):
            for number, common in taken:
                held, _ = parts[number]
                shard = held.shard(name)
                stored = self.array(held.ranks[0], shard.storage)
                if stored.itemsize != target.itemsize:
                    raise LayoutError(
                        f"array '{shard.storage}' of rank {held.ranks[0]} has elements of "
                        f"{stored.itemsize} bytes instead of {target.itemsize}"
                    )
                values = view(stored, shard.offset_of(common), shard.strides, common.size)
                target[common.inside(block)] = values.view(target.dtype)
        self._accessed_bytes += target.nbytes
        if self._accessed_bytes > BLOCK_BYTES:
            self._files.release()
            self._accessed_bytes = 0

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except LayoutError as error:
            text = f"{self.directory}: role {self.role}: tensor '{name}': {error}"
            raise CheckpointError(text) from error

    def _spec(self, name: str) -> TensorSpec:
        try:
            return self.layout.tensors[name]
        except KeyError:
            text = f"{self.directory}: role {self.role} has no tensor '{name}'"
            raise CheckpointError(text) from None

    def weights(self) -> Iterator[tuple[str, TensorSpec]]:
        """Names and specs of the weights, in the model's order; no moments."""
        return ((name, spec) for name, spec in self.layout.tensors.items() if "/" not in name)
