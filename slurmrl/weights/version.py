"""What a weight version is: its name, its manifest and the index of each of its parts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, total_ordering
from typing import Annotated

from slurmrl.errors import CorruptFileError
from slurmrl.fsio.shapes import COUNT, FILE_NAME, INTEGER, SIZE, FieldType, one_of
from slurmrl.layout.layout import TensorSpec

_NAME = re.compile(r"(0|[1-9][0-9]{0,15})\.(0|[1-9][0-9]{0,15})")
RAW = "raw"
"""The tensor's bits, little-endian."""
DELTA = "xor-zstd"
"""The bits XOR those of the base version, compressed (see `delta`)."""
SAME = "same"
"""Nothing is stored: the tensor has the bits that it has in the base version."""


@total_ordering
@dataclass(frozen=True)
class VersionId:
    """Names the weights after a training step of an incarnation.

    A later incarnation comes later, whatever its step: it may have begun at an older commit, and
    what its predecessor published after that was rolled back.
    """

    step: Annotated[int, INTEGER]
    incarnation: Annotated[int, INTEGER]

    @staticmethod
    def parse(name: str) -> VersionId:
        """The inverse of `name`. Raises CorruptFileError."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise CorruptFileError(f"'{name}' is no weight version: expected STEP.INCARNATION")
        return VersionId(int(found[1]), int(found[2]))

    @property
    def name(self) -> str:
        """``<step>.<incarnation>``."""
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
    """Its name in a Hugging Face checkpoint."""
    dtype: str
    shape: tuple[Annotated[int, SIZE], ...]
    encoding: Annotated[str, one_of(RAW, DELTA, SAME)]
    checksum: str
    """Of all bits of the tensor (see `checkpoint.checksums`)."""
    file: str = ""
    offset: Annotated[int, SIZE] = 0
    bytes: Annotated[int, SIZE] = 0
    """Stored in the file."""
    stored_checksum: str = ""
    """Of the stored bytes."""

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.shape, self.dtype)


@dataclass(frozen=True)
class PartFile:
    """A file with tensors' bytes."""

    name: Annotated[str, FILE_NAME]
    size: Annotated[int, SIZE]


@dataclass(frozen=True)
class PartIndex:
    """What one rank has written of a version."""

    part: Annotated[int, COUNT]
    file: PartFile
    tensors: tuple[StoredTensor, ...]
    base: Annotated[str, VERSION] | None = None
    """Name of the version that its deltas are against."""
    frozen: str | None = None
    """See `VersionManifest.frozen`."""


@dataclass(frozen=True)
class VersionManifest:
    """A published version. It is whole if it has no base."""

    id: VersionId
    time: float
    """Seconds since the epoch when it was published, by the publisher's clock."""
    files: tuple[PartFile, ...]
    tensors: tuple[StoredTensor, ...]
    base: Annotated[str, VERSION] | None = None
    """Name of the version that its deltas are against."""
    frozen: str | None = None
    """Of a model that trains adapters: the fingerprint of its frozen weights (see
    `engines.fingerprint`), which the version does not hold. None if it holds all weights."""

    @property
    def bytes(self) -> int:
        """On disk, without the records."""
        return sum(file.size for file in self.files)

    @cached_property
    def by_name(self) -> dict[str, StoredTensor]:
        return {tensor.name: tensor for tensor in self.tensors}
