"""Reading and writing safetensors files as raw bytes, tensor by tensor.

The safetensors package needs all tensors of a file in memory, and its numpy interface does not
support bfloat16. Here a file is written and its checksum computed while each tensor is produced,
and elements are just bytes. Files are byte-identical to those of the package.
Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from slurmrl.errors import CheckpointError, CorruptFileError
from slurmrl.fsio import documents
from slurmrl.fsio.atomic import is_absent
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.failures import explain, unreadable
from slurmrl.fsio.primitives import opened
from slurmrl.fsio.shapes import shown
from slurmrl.tensors.checkpoint.checksums import Checksum
from slurmrl.tensors.layout.copy import Array
from slurmrl.tensors.layout.layout import ITEM_BYTES, TensorSpec

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
"""The numpy type of the elements; for bfloat16, of its bits."""
DTYPE_RANK = ("uint8", "float16", "bfloat16", "int32", "float32", "float64", "int64")
"""The package's order: larger elements first, for alignment, and equal sizes in this order."""
CHUNK_BYTES = 2**20
"""Written at a time: few enough to be in a core's cache when they are digested and written."""
MAX_HEADER_BYTES = 100 * 10**6


@dataclass(frozen=True)
class SavedFile:
    """A file of a checkpoint: its plain name, size in bytes, and checksum (see `checksums`)."""

    name: str
    size: int
    checksum: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to write; ``data`` produces its elements on demand, contiguous."""

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
    """Write and fsync a safetensors file. Raises EnvironmentFailure naming the path."""
    return write_file(path, _parts(in_file_order(entries), metadata), calls=calls)


def in_file_order(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """The order in which tensors are written to a file."""
    return sorted(entries, key=lambda e: (-DTYPE_RANK.index(e.spec.dtype), e.name))


def write_file(path: Path, parts: Iterable[memoryview], *, calls: SystemCalls = REAL) -> SavedFile:
    """Write and fsync a file of a checkpoint. Raises EnvironmentFailure naming the path."""
    checksum = Checksum()
    size = 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        with opened(path, flags, calls) as descriptor:
            for part in parts:
                checksum.update(part)
                size += part.nbytes
                _write_all(descriptor, part, calls)
            calls.fsync(descriptor)
    except OSError as error:
        raise explain(error, "write", path) from error
    return SavedFile(path.name, size, str(checksum))


class TensorFile:
    """A safetensors file, mapped into memory: elements are read when they are accessed.

    Raises CheckpointError if it is missing, CorruptFileError if it is incomplete,
    EnvironmentFailure if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = self._mapped()
        self._size = len(self._map)
        try:
            self._read_header()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptFileError(f"{path} is not a whole safetensors file: {error}") from error

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
            raise ValueError(f"header of {length} bytes in a file of {self._size}")
        header = documents.parse(self._map[8 : 8 + length], self.path)
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self._data = 8 + length
        self.specs: dict[str, TensorSpec] = {}
        self.begins: dict[str, int] = {}
        """The first byte of each tensor, from the end of the header."""
        for name, entry in header.items():
            spec = TensorSpec(tuple(entry["shape"]), DTYPES[entry["dtype"]])
            begin, end = entry["data_offsets"]
            if not all(type(n) is int and n >= 0 for n in (begin, end, *spec.shape)):
                raise ValueError(f"tensor '{name}' is described by {shown(entry)}")
            if end - begin != spec.bytes or self._data + end > self._size:
                raise ValueError(f"tensor '{name}' has bytes {begin} to {end}")
            self.specs[name] = spec
            self.begins[name] = begin

    def flat(self, name: str) -> Array:
        """A tensor's elements as a flat read-only array; KeyError for an unknown name."""
        spec = self.specs[name]
        if self._map.closed:
            self._map = self._mapped()
            if len(self._map) != self._size:
                raise CorruptFileError(f"{self.path} has changed while it was read")
        dtype = np.dtype(NUMPY_DTYPES[spec.dtype])
        return np.frombuffer(self._map, dtype, prod(spec.shape), self._data + self.begins[name])

    def release(self) -> None:
        """Give back the memory of the elements that were accessed."""
        if not self._map.closed:
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Close the file until the next access. No array of it may be in use."""
        self._map.close()


def _parts(entries: list[TensorEntry], metadata: Mapping[str, str]) -> Iterable[memoryview]:
    yield memoryview(_header(entries, metadata))
    for entry in entries:
        data = entry.data()
        expected = prod(entry.spec.shape) * ITEM_BYTES[entry.spec.dtype]
        assert data.flags.c_contiguous, entry.name
        assert data.nbytes == expected, entry.name
        raw = data.reshape(-1).view(np.uint8).data
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


def _write_all(descriptor: int, part: memoryview, calls: SystemCalls) -> None:
    while part:
        part = part[calls.write(descriptor, part) :]
