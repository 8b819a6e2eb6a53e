"""A weight version: its name, its manifest, the index of each part, and their files.

Records are JSON objects with a checksum, replaced atomically. The checksum covers the whole
content. It therefore also detects a damaged name or shape.

A delta between two versions of a tensor is the XOR of the bits, split into planes and compressed.
The tensor is processed in blocks of `BLOCK_BYTES`, which fit into a core's cache. Plane k has byte
k (from the lowest byte on) of all elements of a block. A small step of the optimizer changes the
low bytes of few elements, and the high bytes almost never. The blocks of a tensor form one zstd
frame. Bits are flat arrays of uint8.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property, total_ordering
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import zstandard

from slurmrl.errors import CorruptFileError, WeightVersionError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.documents import COUNT, FILE_NAME, INTEGER, SIZE, TEXT, Fields, FieldType, one_of
from slurmrl.tensors.checkpoint.tensors import Checksum
from slurmrl.tensors.layout import Array, TensorSpec

_NAME = re.compile(r"(0|[1-9][0-9]{0,15})\.(0|[1-9][0-9]{0,15})")
RAW = "raw"
"""Encoding of a tensor by its bits, little-endian."""
DELTA = "xor-zstd"
"""Encoding of a tensor by the compressed difference from the base version (`compress_delta`)."""
SAME = "same"
"""Encoding of a tensor that equals the base version's tensor. Nothing is stored for this tensor."""


BLOCK_BYTES = 1 << 20
"""Size of a block in bytes: part of the format, and a multiple of every item size."""
LEVEL = 1
"""Compression level of zstd. Higher levels save nothing on these bits (docs/benchmarks.md)."""


@total_ordering
@dataclass(frozen=True)
class VersionId:
    """The id of the weights after a training step of an incarnation.

    Versions of an incarnation are later than all versions of earlier incarnations. An incarnation
    that begins at an older commit thereby rolls back later versions of its predecessor.
    """

    step: Annotated[int, INTEGER]
    incarnation: Annotated[int, INTEGER]

    @staticmethod
    def parse(name: str) -> VersionId:
        """Return the id with this `name`. Raises CorruptFileError."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise CorruptFileError(f"'{name}' is not a weight version: expected STEP.INCARNATION")
        return VersionId(int(found[1]), int(found[2]))

    @property
    def name(self) -> str:
        """Name of the version, ``<step>.<incarnation>``."""
        return f"{self.step}.{self.incarnation}"

    def __lt__(self, other: VersionId) -> bool:
        return (self.incarnation, self.step) < (other.incarnation, other.step)

    def __str__(self) -> str:
        return self.name


def _is_version(value: object) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


VERSION = FieldType("STEP.INCARNATION", _is_version)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a version, and where its bytes are."""

    name: str
    """Name of the tensor in a Hugging Face checkpoint."""
    dtype: str
    shape: tuple[Annotated[int, SIZE], ...]
    encoding: Annotated[str, one_of(RAW, DELTA, SAME)]
    checksum: str
    """Checksum of all bits of the tensor (see `tensors.checkpoint.tensors`)."""
    file: str = ""
    offset: Annotated[int, SIZE] = 0
    bytes: Annotated[int, SIZE] = 0
    """Number of bytes in the file."""
    stored_checksum: str = ""
    """Checksum of the stored bytes."""

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.shape, self.dtype)


@dataclass(frozen=True)
class PartFile:
    """A file with the bytes of tensors."""

    name: Annotated[str, FILE_NAME]
    size: Annotated[int, SIZE]


@dataclass(frozen=True)
class PartIndex:
    """The part of a version that one rank has written."""

    part: Annotated[int, COUNT]
    file: PartFile
    tensors: tuple[StoredTensor, ...]
    base: Annotated[str, VERSION] | None = None
    """Name of the base version of deltas; None without deltas."""
    frozen: str | None = None
    """Fingerprint of frozen weights, as in `VersionManifest`."""


@dataclass(frozen=True)
class VersionManifest:
    """A published version, which is full if it has no base."""

    id: VersionId
    time: float
    """Time of publication in seconds since the epoch, by the publisher's clock."""
    files: tuple[PartFile, ...]
    tensors: tuple[StoredTensor, ...]
    base: Annotated[str, VERSION] | None = None
    """Name of the base version of deltas; None for a full version."""
    frozen: str | None = None
    """Fingerprint of the frozen weights, which a version of adapters does not contain (see
    `engines.role_weights`). None if the version contains all weights."""

    @property
    def bytes(self) -> int:
        """Size of the parts' files in bytes."""
        return sum(file.size for file in self.files)

    @cached_property
    def by_name(self) -> dict[str, StoredTensor]:
        return {tensor.name: tensor for tensor in self.tensors}


FORMAT = 2
READABLE = (1, 2)
"""Formats of records that slurmrl reads. Records of format 1 always have all weights of a model, so
its readers would mistake adapters for all weights."""
MANIFEST = "manifest.json"
_CONTENT = FieldType("an object", lambda value: isinstance(value, dict))
_FIELDS: Fields = {"format": INTEGER, "checksum": TEXT, "content": _CONTENT}
R = TypeVar("R", bound=documents.Dataclass)


def part_file(part: int) -> str:
    return f"part-{part}.bin"


def part_index(part: int) -> str:
    return f"part-{part}.json"


def write_record(path: Path, record: documents.Dataclass, *, calls: SystemCalls = REAL) -> None:
    """Replace a record durably. Raises EnvironmentFailure."""
    content = documents.to_json(record)
    values = {"format": FORMAT, "checksum": _checksum(content), "content": content}
    atomic.replace(path, (_text(values) + "\n").encode(), calls=calls)


def read_record(path: Path, kind: type[R], *, calls: SystemCalls = REAL) -> R:
    """Return a record. Raises FileNotFoundError, CorruptFileError, EnvironmentFailure."""
    values = documents.read(path, _FIELDS, _FIELDS, calls=calls)
    if values["format"] not in READABLE:
        raise CorruptFileError(
            f"{path} has format {values['format']}; this program reads formats up to {FORMAT}"
        )
    if values["checksum"] != _checksum(values["content"]):
        raise CorruptFileError(f"{path} has another checksum")
    return documents.from_json(kind, values["content"], path)


def read_part(folder: Path, part: int, *, calls: SystemCalls = REAL) -> PartIndex:
    """Return the index of a finished part. Raises WeightVersionError, EnvironmentFailure."""
    return _read(folder / part_index(part), PartIndex, calls)


def read_manifest(folder: Path, *, calls: SystemCalls = REAL) -> VersionManifest:
    """Return the manifest of a published version.

    Raises WeightVersionError if the manifest is missing or damaged, EnvironmentFailure if it cannot
    be read.
    """
    manifest = _read(folder / MANIFEST, VersionManifest, calls)
    if manifest.id.name != folder.name:
        raise WeightVersionError(f"{folder} is damaged: its {MANIFEST} has version {manifest.id}")
    return manifest


def version_ids(folder: Path, *, calls: SystemCalls = REAL) -> list[VersionId]:
    """Return the versions with a directory in ``folder``, published or not, from old to new.

    Raises EnvironmentFailure.
    """
    found = []
    try:
        names = atomic.list_names(folder, calls=calls)
    except FileNotFoundError:  # No version has been written yet.
        return []
    for name in names:
        try:
            found.append(VersionId.parse(name))
        except CorruptFileError:
            continue
    return sorted(found)


def _read(path: Path, kind: type[R], calls: SystemCalls) -> R:
    try:
        return read_record(path, kind, calls=calls)
    except FileNotFoundError as error:
        raise WeightVersionError(f"{path} is missing") from error
    except CorruptFileError as error:
        raise WeightVersionError(str(error)) from error


def _checksum(content: dict[str, Any]) -> str:
    return str(Checksum(_text(content).encode()))


def _text(values: dict[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False)


def compress_delta(bits: Array, base: Array, item_bytes: int) -> bytes:
    """Return the compressed delta between two arrays of equal size."""
    compressor = zstandard.ZstdCompressor(level=LEVEL).compressobj(size=bits.size)
    pieces = []
    for begin in range(0, bits.size, BLOCK_BYTES):
        block = bits[begin : begin + BLOCK_BYTES] ^ base[begin : begin + BLOCK_BYTES]
        pieces.append(compressor.compress(_split(block, item_bytes).data))
    pieces.append(compressor.flush())
    return b"".join(pieces)


def apply_delta(stored: bytes | memoryview, bits: Array, item_bytes: int) -> None:
    """Apply a delta of `compress_delta` to ``bits`` in place.

    Raises WeightVersionError if the delta belongs to an array of another size; ``bits`` are then
    invalid.
    """
    buffer = np.empty(min(BLOCK_BYTES, bits.size), np.uint8)
    try:
        with zstandard.ZstdDecompressor().stream_reader(stored) as reader:
            for begin in range(0, bits.size, BLOCK_BYTES):
                block = bits[begin : begin + BLOCK_BYTES]
                planes = buffer[: block.size]
                _fill(reader, planes)
                block.view(_word(item_bytes))[...] ^= _joined(planes, item_bytes)
            if reader.read(1):
                raise WeightVersionError("a delta is longer than its tensor")
    except zstandard.ZstdError as error:
        raise WeightVersionError(f"a delta cannot be decompressed: {error}") from error


def _split(block: Array, item_bytes: int) -> Array:
    """Return the planes of a block, one after the other."""
    words = block.view(_word(item_bytes))
    planes = np.empty((item_bytes, words.size), np.uint8)
    for place, plane in enumerate(planes):
        np.right_shift(words, 8 * place, out=plane, casting="unsafe")
    return planes.reshape(-1)


def _joined(planes: Array, item_bytes: int) -> Array:
    """Return the elements with these planes, as unsigned integers."""
    *low, highest = planes.reshape(item_bytes, -1)
    words = highest.astype(_word(item_bytes))
    for plane in reversed(low):
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, plane, out=words)
    return words


def _word(item_bytes: int) -> str:
    """Return the numpy type of elements as unsigned integers.

    Shifting integers is several times as fast as transposing bytes.
    """
    return f"<u{item_bytes}"


def _fill(reader: zstandard.ZstdDecompressionReader, target: Array) -> None:
    view = target.data
    while view:
        count = reader.readinto(view)
        if not count:
            raise WeightVersionError("a delta is shorter than its tensor")
        view = view[count:]
