"""The tensors of one role in a checkpoint of any world size. Torch-free.

Rank r of n writes its arrays to ``<role>.<r>.safetensors``. Rank 0 also writes the layout of all
ranks' arrays, ``<role>.layout.json``, so that a reader opens only the files that it needs. Weights
have their Hugging Face names. An optimizer moment is named ``<moment>/<weight>``. A file may also
have arrays outside the layout, such as the rank's random state.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slurmrl.errors import CheckpointError, CorruptFileError, LayoutError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.documents import (
    COUNT,
    INTEGER,
    SIZE,
    TEXT,
    Fields,
    check,
    each,
    items,
    list_of,
    one_of,
    table,
)
from slurmrl.tensors.checkpoint.tensors import (
    NUMPY_DTYPES,
    SavedFile,
    TensorEntry,
    TensorFile,
    write_file,
    write_tensors,
)
from slurmrl.tensors.layout import (
    ITEM_BYTES,
    Array,
    Box,
    Layout,
    Shard,
    Source,
    TensorSpec,
    blocks,
    cover,
    sources,
    view,
)

BLOCK_BYTES = 16 * 2**20
"""Maximum memory of a reader, in addition to the tensors that it fills."""


KEY = "slurmrl"
VERSION = 2
MOST_OPEN = 256
"""Maximum number of files that are open at once; the limit of a process is often 1,024."""
LIMIT_BYTES = 1 << 30
"""Maximum size of a layout file. The file of thousands of ranks has a few MB."""
_BOX = items(list_of(COUNT), list_of(SIZE), list_of(SIZE), TEXT, SIZE, list_of(SIZE))
_LAYOUT: Fields = {
    "ranks": COUNT,
    "tensors": each(items(list_of(SIZE), one_of(*ITEM_BYTES), COUNT)),
    "holders": list_of(list_of(_BOX)),
}
_LAYOUT_FILE: Fields = {
    "version": INTEGER,
    "role": TEXT,
    "step": INTEGER,
    "layout": table(_LAYOUT, _LAYOUT),
}
_HEADER: Fields = {"version": INTEGER, "role": TEXT, "rank": COUNT, "ranks": COUNT, "step": INTEGER}
_HEADER_1: Fields = {
    "version": INTEGER,
    "role": TEXT,
    "rank": COUNT,
    "ranks": COUNT,
    "step": INTEGER,
    "tensors": each(items(list_of(SIZE), one_of(*ITEM_BYTES))),
    "pieces": list_of(items(TEXT, list_of(SIZE), list_of(SIZE), TEXT, SIZE, list_of(SIZE))),
}
"""Header of a rank's file in version 1, which contains the rank's part of the layout."""


@dataclass(frozen=True)
class ShardHeader:
    """The metadata of one rank's file."""

    role: str
    rank: int
    ranks: int
    step: int
    """Number of optimizer steps taken."""

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"))


@dataclass(frozen=True)
class RoleSnapshot:
    """One rank's part of a role, which any thread may write."""

    header: ShardHeader
    arrays: tuple[TensorEntry, ...]
    layout: Layout | None
    """Layout of all ranks' arrays, which rank 0 writes; may be None on other ranks."""
    frozen: str | None = None
    """Fingerprint of the frozen weights to which adapters belong; rank 0 writes it."""

    def paths(self, directory: Path) -> list[Path]:
        """Return the files that `write` makes."""
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
    """Reader of one role of a checkpoint.

    All methods raise CheckpointError or CorruptFileError if files are missing or inconsistent, and
    EnvironmentFailure if files cannot be read.
    """

    def __init__(self, directory: Path, role: str) -> None:
        self.directory = directory
        self.role = role
        self._files = RankFiles(directory, role)
        self.step, self.layout, self.frozen = read_layout(directory, role, self._files)
        self._accessed_bytes = 0

    @property
    def ranks(self) -> int:
        """Number of ranks that wrote the checkpoint."""
        return self.layout.ranks

    def check(self, tensors: Mapping[str, TensorSpec]) -> None:
        """Raise CheckpointError unless the checkpoint has exactly these tensors."""
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
        """Return a flat array of one rank's file. Copy it before you read another array."""
        return self._files.array(rank, storage)

    def read(self, name: str, box: Box | None = None) -> Array:
        """Return a box of a tensor (default: the whole tensor) as a contiguous array.

        A bfloat16 tensor is returned as its bits (uint16). Raises CheckpointError for an unknown or
        incomplete tensor.
        """
        spec = self._spec(name)
        box = box or Box.whole(spec.shape)
        target = np.empty(box.size, dtype=NUMPY_DTYPES[spec.dtype])
        for block, fill in self._blocks(name, box):
            index: tuple[Any, ...] = (*block.inside(box), ...)  # With ..., scalars are views too.
            fill(target[index])
        return target

    def blocks(self, name: str, box: Box) -> Iterator[tuple[Box, Array]]:
        """Yield box and values of each part of a tensor's box; parts have up to `BLOCK_BYTES`.

        Values have the form of `read`. Raises as `read`.
        """
        dtype = NUMPY_DTYPES[self._spec(name).dtype]
        for block, fill in self._blocks(name, box):
            values = np.empty(block.size, dtype=dtype)
            fill(values)
            yield block, values

    def _blocks(self, name: str, box: Box) -> Iterator[tuple[Box, Callable[[Array], None]]]:
        """Yield the parts of a box, each with a function that writes its values into an array."""
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
        """Yield names and specs of the weights, without moments, in the model's order."""
        return ((name, spec) for name, spec in self.layout.tensors.items() if "/" not in name)


def layout_name(role: str) -> str:
    return f"{role}.layout.json"


def layout_text(role: str, step: int, layout: Layout, frozen: str | None) -> bytes:
    values = {"version": VERSION, "role": role, "step": step, "layout": layout.to_json()}
    if frozen is not None:
        values["frozen"] = frozen
    return json.dumps(values, separators=(",", ":")).encode()


def read_layout(directory: Path, role: str, files: RankFiles) -> tuple[int, Layout, str | None]:
    """Return the number of optimizer steps, the layout, and `RoleSnapshot.frozen`.

    In checkpoints of version 1, the headers of all ranks' files have the layout, so all files are
    opened. Raises CheckpointError, CorruptFileError, EnvironmentFailure.
    """
    path = directory / layout_name(role)
    try:
        text = atomic.read(path, limit_bytes=LIMIT_BYTES)
    except FileNotFoundError:
        return *_read_version_1(path, files), None
    values = documents.parse(text, path, {"version": INTEGER, "role": TEXT}, ("version", "role"))
    if values["version"] != VERSION:
        raise CheckpointError(
            f"{path} has version {values['version']}; this program reads versions 1 to {VERSION}"
        )
    if values["role"] != role:
        raise CheckpointError(f"{path} belongs to {values['role']}; copy the checkpoint again")
    check(values, {**_LAYOUT_FILE, "frozen": TEXT}, path, _LAYOUT_FILE)
    with documents.expecting(path):
        layout = Layout.from_json(values["layout"])
    files.origin = layout.ranks, values["step"]
    return values["step"], layout, values.get("frozen")


def _read_version_1(missing: Path, files: RankFiles) -> tuple[int, Layout]:
    if files.header(0)["version"] != 1:
        raise CheckpointError(f"{missing} does not exist")
    first = files.header(0, _HEADER_1)
    headers = [first, *(files.header(rank, _HEADER_1) for rank in range(1, first["ranks"]))]
    with documents.expecting(missing.parent):
        tensors = {
            name: TensorSpec(tuple(shape), dtype)
            for name, (shape, dtype) in first["tensors"].items()
        }
        shards = [[Shard.from_json(piece) for piece in header["pieces"]] for header in headers]
        return first["step"], Layout.of(tensors, shards)


def file_name(role: str, rank: int) -> str:
    return f"{role}.{rank}.safetensors"


class RankFiles:
    """The arrays of all ranks' files.

    All methods raise CheckpointError or CorruptFileError for a missing or foreign file, and
    EnvironmentFailure for an unreadable file.
    """

    def __init__(self, directory: Path, role: str) -> None:
        self._directory = directory
        self._role = role
        self.origin: tuple[int, int] | None = None
        """Number of ranks and step that all files must have; None before they are known."""
        self._files: dict[int, TensorFile] = {}
        self._kinds: list[TensorFile] = []
        """One file of each kind; files of a kind have equal specs and offsets."""
        self._open: OrderedDict[int, None] = OrderedDict()
        """Ranks whose files are open, from the least to the most recently used."""

    def header(self, rank: int, fields: Fields = _HEADER) -> dict[str, Any]:
        """Return the metadata of a rank's file, which must have these fields."""
        return _header(self._file(rank), fields)

    def has(self, rank: int, array: str) -> bool:
        return array in self._file(rank).specs

    def array(self, rank: int, name: str) -> Array:
        """Return an array of a rank's file, flat. Copy the array before you read another file."""
        file = self._file(rank)
        try:
            found = file.flat(name)
        except KeyError as error:
            raise CheckpointError(f"{file.path} has no array '{name}'") from error
        return found

    def release(self) -> None:
        """Release the memory of the tensors that were read."""
        for rank in self._open:
            self._files[rank].release()

    def _file(self, rank: int) -> TensorFile:
        if rank not in self._files:
            self._files[rank] = self._opened(rank)
        self._open[rank] = None
        self._open.move_to_end(rank)
        if len(self._open) > MOST_OPEN:
            oldest, _ = self._open.popitem(last=False)
            self._files[oldest].close()
        return self._files[rank]

    def _opened(self, rank: int) -> TensorFile:
        file = TensorFile(self._directory / file_name(self._role, rank))
        values = _header(file, _HEADER)
        if (values["role"], values["rank"]) != (self._role, rank):
            label = f"{values['role']} rank {values['rank']}"
            raise CheckpointError(f"{file.path} belongs to {label}; copy the checkpoint again")
        origin = values["ranks"], values["step"]
        if self.origin not in (None, origin):
            raise CheckpointError(
                f"{file.path} has (ranks, step) {origin}, but the checkpoint has {self.origin}"
            )
        self.origin = origin
        # Share equal specs: thousands of files with thousands of arrays would fill the memory.
        for other in self._kinds:
            if (other.specs, other.begins) == (file.specs, file.begins):
                file.specs, file.begins = other.specs, other.begins
                return file
        self._kinds.append(file)
        return file


def _header(file: TensorFile, fields: Fields) -> dict[str, Any]:
    try:
        return documents.parse(file.metadata[KEY], "its header", fields, fields)
    except (KeyError, TypeError, AttributeError, CorruptFileError) as error:
        raise CheckpointError(f"{file.path} has an invalid header: {error!r}") from error
