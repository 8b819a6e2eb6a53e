"""The tensors of one role in a checkpoint, whatever world size wrote them.

Rank r of n writes ``<role>.<r>.safetensors``: arrays, and metadata with the box of a tensor that
each array holds. Weights have their Hugging Face names; optimizer moments have the moment's name, a
slash, and the weight's name. A file may also have arrays outside the layout (the rank's random
state).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slurmrl.checkpoint.tensors import (
    NUMPY_DTYPES,
    SavedFile,
    TensorEntry,
    TensorFile,
    write_tensors,
)
from slurmrl.errors import CheckpointError, LayoutError
from slurmrl.fsio import documents
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.shapes import COUNT, INTEGER, SIZE, TEXT, Fields, each, items, list_of, one_of
from slurmrl.layout.box import Box
from slurmrl.layout.copy import Array, execute
from slurmrl.layout.layout import ITEM_BYTES, Layout, TensorSpec
from slurmrl.layout.plan import fill
from slurmrl.layout.shard import Shard

KEY = "slurmrl"
VERSION = 1
_FIELDS: Fields = {
    "version": INTEGER,
    "role": TEXT,
    "rank": COUNT,
    "ranks": COUNT,
    "step": INTEGER,
    "tensors": each(items(list_of(SIZE), one_of(*ITEM_BYTES))),
    "pieces": list_of(items(TEXT, list_of(SIZE), list_of(SIZE), TEXT, SIZE, list_of(SIZE))),
}


@dataclass(frozen=True)
class ShardHeader:
    """The metadata of one rank's file."""

    role: str
    rank: int
    ranks: int
    step: int
    """Optimizer steps so far."""
    tensors: Mapping[str, TensorSpec]
    shards: tuple[Shard, ...]

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": VERSION,
                "role": self.role,
                "rank": self.rank,
                "ranks": self.ranks,
                "step": self.step,
                "tensors": {k: [list(t.shape), t.dtype] for k, t in self.tensors.items()},
                "pieces": [shard.to_json() for shard in self.shards],
            },
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(text: str) -> ShardHeader:
        values = documents.parse(text, "its layout", _FIELDS, _FIELDS)
        if values["version"] != VERSION:
            raise ValueError(f"version {values['version']} instead of {VERSION}")
        return ShardHeader(
            values["role"],
            values["rank"],
            values["ranks"],
            values["step"],
            {k: TensorSpec(tuple(shape), dtype) for k, (shape, dtype) in values["tensors"].items()},
            tuple(Shard.from_json(shard) for shard in values["pieces"]),
        )


def file_name(role: str, rank: int) -> str:
    return f"{role}.{rank}.safetensors"


@dataclass(frozen=True)
class RoleSnapshot:
    """One rank's part of a role, ready to be written by any thread."""

    part: ShardHeader
    arrays: tuple[TensorEntry, ...]

    def path(self, directory: Path) -> Path:
        return directory / file_name(self.part.role, self.part.rank)

    def write(self, directory: Path, *, calls: SystemCalls = REAL) -> SavedFile:
        """Write the rank's file, durably. Raises EnvironmentFailure."""
        metadata = {KEY: self.part.to_json()}
        return write_tensors(self.path(directory), self.arrays, metadata, calls=calls)


class RoleCheckpoint:
    """Reader of one role. Raises CheckpointError if files are missing or inconsistent."""

    def __init__(self, directory: Path, role: str) -> None:
        self.directory = directory
        self.role = role
        first_file, first = self._open(0)
        opened = [(first_file, first), *map(self._open, range(1, first.ranks))]
        self._files = [file for file, _ in opened]
        self.step = first.step
        with documents.expecting(directory):
            self.layout = Layout.of(first.tensors, [part.shards for _, part in opened])
            self._holders = self.layout.by_name()

    def _open(self, rank: int) -> tuple[TensorFile, ShardHeader]:
        file = TensorFile(self.directory / file_name(self.role, rank))
        try:
            part = ShardHeader.from_json(file.metadata[KEY])
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file.path} has an invalid layout: {error!r}") from error
        if (part.role, part.rank) != (self.role, rank):
            raise CheckpointError(f"{file.path} is labelled {part.role} rank {part.rank}")
        return file, part

    @property
    def ranks(self) -> int:
        """Number of ranks that wrote it."""
        return len(self._files)

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
        return storage in self._files[rank].specs

    def array(self, rank: int, storage: str) -> Array:
        """An array of one rank's file, flat."""
        try:
            return self._files[rank].flat(storage)
        except KeyError as error:
            raise CheckpointError(f"{self._files[rank].path} has no array '{storage}'") from error

    def read(self, name: str, box: Box | None = None) -> Array:
        """Read a box of a tensor (default: all of it) as a contiguous array, bfloat16 as its bits
        (uint16).

        Raises CheckpointError for an unknown or incomplete tensor.
        """
        if name not in self.layout.tensors:
            raise CheckpointError(f"{self.directory}: role {self.role} has no tensor '{name}'")
        spec = self.layout.tensors[name]
        shard = Shard.contiguous(name, box or Box.whole(spec.shape))
        target = np.empty(shard.box.count, dtype=NUMPY_DTYPES[spec.dtype])
        try:
            copies = fill(0, shard, self._holders[name])
            execute(copies, self.array, lambda _rank, _storage: target)
        except LayoutError as error:
            raise CheckpointError(f"{self.directory}: role {self.role}: {error}") from error
        return target.reshape(shard.box.size)

    def weights(self) -> Iterator[tuple[str, TensorSpec]]:
        """Names and specs of the weights, in the model's order; no moments."""
        return ((name, spec) for name, spec in self.layout.tensors.items() if "/" not in name)
