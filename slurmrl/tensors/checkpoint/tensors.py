"""Safetensors files as raw bytes, tensor by tensor, with checksums. Torch-free.

The safetensors package needs all tensors of a file in memory, and its numpy interface does not
support bfloat16. This module writes a file and computes its checksum while each tensor is produced,
and treats elements as bytes. Files are byte-identical to the package's files.
Format: https://huggingface.co/docs/safetensors

Checksums find damage, not forgery, because the manifest is next to the files. XXH3 takes a tenth of
the CPU time of writing. SHA-256, used in older checkpoints, takes twice the time of writing.

Most parameters of a model are stored as a tensor of the same name. Some files of experts have a
tensor for each row of a parameter. Other models transpose parameters, or store several parameters
in one tensor. A `Storage` maps parameters to slices of tensors.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from io import BufferedIOBase
from math import prod
from pathlib import Path
from typing import Any, Final

from slurmrl.errors import CheckpointError, CorruptFileError
from slurmrl.fsio import documents
from slurmrl.fsio.atomic import is_absent
from slurmrl.fsio.calls import REAL, SystemCalls, explain, opened, unreadable, write_all
from slurmrl.fsio.documents import shown
from slurmrl.tensors.layout import ITEM_BYTES, Array, Box, Index, TensorSpec, row_major

CODES: dict[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
NUMPY_DTYPES: dict[str, str] = {
    "float64": "<f8",
    "float32": "<f4",
    "bfloat16": "<u2",
    "float16": "<f2",
    "int64": "<i8",
    "int32": "<i4",
    "uint8": "u1",
}
"""numpy type of the elements of each dtype; for bfloat16, the type of the bits."""
DTYPE_RANK = ("uint8", "float16", "bfloat16", "int32", "float32", "float64", "int64")
"""Order of dtypes in files. Larger elements come first, for alignment, as in the package."""
CHUNK_BYTES = 2**20
"""Number of bytes that are hashed and written at a time: as many as a core's cache holds."""
MAX_HEADER_BYTES = 100 * 10**6


KIND: Final = "xxh3_128"
"""Kind of the checksums that slurmrl writes."""
BUFFER_BYTES = 2**18
"""Number of bytes that are read and hashed at a time: as many as a core's cache holds."""


@dataclass(frozen=True)
class SavedFile:
    """A file of a checkpoint: its name in the directory, size in bytes, and `checksum`."""

    name: str
    size: int
    checksum: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to write; ``data`` returns its elements, contiguous, when they are needed."""

    name: str
    spec: TensorSpec
    data: Callable[[], Array]


def write_tensors(
    path: Path,
    entries: Iterable[TensorEntry],
    metadata: Mapping[str, str],
    *,
    calls: SystemCalls = REAL,
) -> SavedFile:
    """Write and fsync a safetensors file. Raises EnvironmentFailure."""
    return write_file(path, _parts(in_file_order(entries), metadata), calls=calls)


def in_file_order(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Return tensors in the order in which a file has them."""
    return sorted(entries, key=lambda e: (-DTYPE_RANK.index(e.spec.dtype), e.name))


def write_file(path: Path, parts: Iterable[memoryview], *, calls: SystemCalls = REAL) -> SavedFile:
    """Write and fsync a file of a checkpoint. Raises EnvironmentFailure."""
    checksum = Checksum()
    size = 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        with opened(path, flags, calls) as descriptor:
            for part in parts:
                checksum.update(part)
                size += part.nbytes
                write_all(descriptor, part, calls)
            calls.fsync(descriptor)
    except OSError as error:
        raise explain(error, "write", path) from error
    return SavedFile(path.name, size, str(checksum))


class TensorFile:
    """A safetensors file, mapped into memory: elements are read when they are accessed."""

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises CheckpointError if the file is missing, CorruptFileError if it is incomplete,
        EnvironmentFailure if it cannot be read.
        """
        self.path = path
        self._map = self._mapped()
        self._size = len(self._map)
        try:
            self._read_header()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptFileError(f"{path} is not a complete safetensors file: {error}") from error

    def _mapped(self) -> mmap.mmap:
        try:
            with os.fdopen(REAL.open(self.path, os.O_RDONLY), "rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            if not any(map(is_absent, (self.path, self.path.parent))):
                raise explain(error, "read", self.path) from error
            raise CheckpointError(f"{self.path} does not exist") from error
        except ValueError as error:
            raise CorruptFileError(f"{self.path} is empty") from error
        except OSError as error:
            raise unreadable(error, self.path) from error

    def _read_header(self) -> None:
        length = int.from_bytes(self._map[:8], "little")
        if length > min(MAX_HEADER_BYTES, self._size - 8):
            raise ValueError(f"its header of {length} bytes exceeds its {self._size} bytes")
        header = documents.parse(self._map[8 : 8 + length], self.path)
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self._data = 8 + length
        self.specs: dict[str, TensorSpec] = {}
        """Specs by name. A type that slurmrl does not support has its name in safetensors, such as
        ``I8``."""
        self.begins: dict[str, int] = {}
        """Offset in bytes of each tensor from the end of the header."""
        last = 0
        for name, entry in header.items():
            spec = TensorSpec(tuple(entry["shape"]), DTYPES.get(entry["dtype"], entry["dtype"]))
            begin, end = entry["data_offsets"]
            if not all(type(n) is int and n >= 0 for n in (begin, end, *spec.shape)):
                raise ValueError(f"tensor '{name}' has the invalid entry {shown(entry)}")
            size = spec.bytes if spec.dtype in ITEM_BYTES else end - begin
            if end - begin != size or self._data + end > self._size:
                raise ValueError(f"tensor '{name}' has the invalid bytes {begin} to {end}")
            self.specs[name] = spec
            self.begins[name] = begin
            last = max(last, end)
        if self._data + last != self._size:
            raise ValueError(f"its header describes {self._data + last} of its {self._size} bytes")

    def flat(self, name: str) -> Array:
        """Return a tensor's elements as a flat read-only array.

        Raises KeyError for an unknown name, CorruptFileError for a type that slurmrl does not read.
        """
        spec = self.specs[name]
        if spec.dtype not in NUMPY_DTYPES:
            raise CorruptFileError(f"{self.path}: tensor '{name}': unsupported type {spec.dtype}")
        if self._map.closed:
            self._map = self._mapped()
            if len(self._map) != self._size:
                raise CorruptFileError(f"the size of {self.path} has changed during reading")
        import numpy as np

        dtype = np.dtype(NUMPY_DTYPES[spec.dtype])
        return np.frombuffer(self._map, dtype, prod(spec.shape), self._data + self.begins[name])

    def release(self) -> None:
        """Release the memory of the elements that were accessed."""
        if not self._map.closed:
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Close the file until the next access. No array of the file may be in use."""
        self._map.close()


def _parts(entries: list[TensorEntry], metadata: Mapping[str, str]) -> Iterable[memoryview]:
    yield memoryview(_header(entries, metadata))
    for entry in entries:
        data = entry.data()
        expected = prod(entry.spec.shape) * ITEM_BYTES[entry.spec.dtype]
        assert data.flags.c_contiguous, entry.name
        assert data.nbytes == expected, entry.name
        raw = data.reshape(-1).view("u1").data
        for begin in range(0, raw.nbytes, CHUNK_BYTES):
            yield raw[begin : begin + CHUNK_BYTES]


def _header(entries: list[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.spec.bytes
        header[entry.name] = {
            "dtype": CODES[entry.spec.dtype],
            "shape": list(entry.spec.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _xxh3_128() -> Any:
    import xxhash  # Only commands that compute checksums import this.

    return xxhash.xxh3_128()


_KINDS: Final[dict[str, Callable[[], Any]]] = {KIND: _xxh3_128, "sha256": hashlib.sha256}


class Checksum:
    """Checksum of bytes, which may be passed in parts."""

    def __init__(self, data: bytes | memoryview = b"", *, kind: str = KIND) -> None:
        self._kind = kind
        self._digest = _KINDS[kind]()
        self._digest.update(data)

    def update(self, data: bytes | memoryview) -> None:
        self._digest.update(data)

    def __str__(self) -> str:
        return f"{self._kind}:{self._digest.hexdigest()}"


def kind_of(checksum: str) -> str | None:
    """Return the kind of a checksum; None if slurmrl does not know the kind."""
    kind = checksum.partition(":")[0]
    return kind if kind in _KINDS else None


def checksum(file: BufferedIOBase, kind: str = KIND) -> str:
    """Return the checksum of a file's bytes from its current position on."""
    found = Checksum(kind=kind)
    buffer = memoryview(bytearray(BUFFER_BYTES))
    while count := file.readinto(buffer):
        found.update(buffer[:count])
    return str(found)


@dataclass(frozen=True)
class TensorSlice:
    """The place of a parameter's box in a file's tensor."""

    tensor: str
    part: Box | None = None
    """Box of the parameter; None for the whole parameter."""
    dims: Index | None = None
    """Dim of the parameter for each dim of the tensor; None for all dims in order. In dims that the
    tensor lacks, the box has length 1."""
    start: Index | None = None
    """First index of the box in the tensor; None if all indices are 0."""

    def box(self, parameter: Box) -> Box:
        """Return the box of the tensor that stores a box of the parameter."""
        dims = self._dims(len(parameter.size))
        starts = zip(self._start(len(dims)), dims, strict=True)
        origin = self._origin(len(parameter.size))
        start = tuple(at + parameter.start[dim] - origin[dim] for at, dim in starts)
        return Box(start, tuple(parameter.size[dim] for dim in dims))

    def parameter(self, stored: Box) -> Box:
        """Return the box of the parameter that a box of the tensor stores, inverting `box`."""
        ndim = len(stored.size) if self.part is None else len(self.part.size)
        start, size = list(self._origin(ndim)), [1] * ndim
        ahead = zip(self._dims(ndim), stored.start, self._start(len(stored.size)), strict=True)
        for (dim, begin, at), length in zip(ahead, stored.size, strict=True):
            start[dim] += begin - at
            size[dim] = length
        return Box(tuple(start), tuple(size))

    def of(self, shape: Index) -> Box:
        """Return the box of a parameter of ``shape`` that the slice stores."""
        return Box.whole(shape) if self.part is None else self.part

    def arranged(self, values: Array) -> Array:
        """Return the elements of a box of the parameter, in the order of the tensor's dims."""
        if self.dims is None:
            return values
        shape = [values.shape[dim] for dim in self.dims]
        return values.transpose(self._order(values.ndim)).reshape(shape)

    def restored(self, values: Array) -> Array:
        """Return the elements of a box of the tensor, in the order of the parameter's dims."""
        if self.dims is None:
            return values
        ndim = len(self.dims) if self.part is None else len(self.part.size)
        order = self._order(ndim)
        wide = values.reshape(*values.shape, *(1 for _ in order[values.ndim :]))
        return wide.transpose([order.index(dim) for dim in range(ndim)])

    def offset_and_strides(self, shape: Index, ndim: int) -> tuple[int, Index]:
        """Return offset and strides, in elements, of the box in a tensor of ``shape``.

        There is a stride for each of the parameter's ``ndim`` dims.
        """
        steps = row_major(shape)
        strides = [prod(shape)] * ndim
        for dim, step in zip(self._dims(ndim), steps, strict=True):
            strides[dim] = step
        starts = zip(self._start(len(shape)), steps, strict=True)
        return sum(at * step for at, step in starts), tuple(strides)

    def _dims(self, ndim: int) -> Index:
        return tuple(range(ndim)) if self.dims is None else self.dims

    def _start(self, ndim: int) -> Index:
        return (0,) * ndim if self.start is None else self.start

    def _origin(self, ndim: int) -> Index:
        return (0,) * ndim if self.part is None else self.part.start

    def _order(self, ndim: int) -> list[int]:
        """Return the parameter's dims: the tensor's dims, then the dims that the tensor lacks."""
        dims = self._dims(ndim)
        return [*dims, *(dim for dim in range(ndim) if dim not in dims)]


Storage = Callable[[str, Index], tuple[TensorSlice, ...]]
"""Function from a parameter's name and shape to the slices that store it."""


def by_name(name: str, shape: Index) -> tuple[TensorSlice, ...]:
    """Return the whole tensor that has the name of the parameter."""
    return (TensorSlice(name),)


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file, and the parameters that it stores."""

    spec: TensorSpec
    shards: tuple[tuple[str, TensorSpec, TensorSlice], ...]
    """(name, spec, slice) of each parameter of which the tensor has a box."""


def file_tensors(
    parameters: Iterable[tuple[str, TensorSpec]], storage: Storage
) -> dict[str, FileTensor]:
    """Return a mapping from names to the tensors that store these parameters, in their order."""
    slices: dict[str, list[tuple[str, TensorSpec, TensorSlice]]] = {}
    for name, spec in parameters:
        for stored in storage(name, spec.shape):
            slices.setdefault(stored.tensor, []).append((name, spec, stored))
    return {tensor: _file_tensor(shards) for tensor, shards in slices.items()}


def _file_tensor(shards: list[tuple[str, TensorSpec, TensorSlice]]) -> FileTensor:
    shards.sort(key=lambda shard: shard[2].start or ())
    stops = [stored.box(stored.of(spec.shape)).stop for _, spec, stored in shards]
    shape = tuple(map(max, zip(*stops, strict=True)))
    return FileTensor(TensorSpec(shape, shards[0][1].dtype), tuple(shards))


def file_entries(
    parameters: Iterable[tuple[str, TensorSpec]],
    read: Callable[[str, Box], Array],
    storage: Storage,
) -> list[TensorEntry]:
    """Return the tensors to write for these parameters; ``read`` returns a parameter's box."""
    return [
        TensorEntry(name, tensor.spec, partial(assembled, read, tensor))
        for name, tensor in file_tensors(parameters, storage).items()
    ]


def assembled(read: Callable[[str, Box], Array], tensor: FileTensor) -> Array:
    """Return the elements of a file's tensor; ``read`` returns a parameter's box."""
    import numpy as np

    whole = None
    for name, spec, stored in tensor.shards:
        box = stored.of(spec.shape)
        values = stored.arranged(read(name, box).reshape(box.size))
        if len(tensor.shards) == 1:
            return np.asarray(values, order="C")  # ascontiguousarray would add a dim to a scalar.
        if whole is None:
            whole = np.empty(tensor.spec.shape, values.dtype)
        whole[stored.box(box).slices] = values
    assert whole is not None, "a tensor without parameters"
    return whole
