"""Writing of weight versions: trainer ranks write parts, then a rank writes the manifest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from slurmrl.errors import EnvironmentFailure, WeightVersionError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import (
    FILE_MODE,
    REAL,
    SystemCalls,
    discard,
    explain,
    make_private,
    pwrite_all,
)
from slurmrl.tensors.checkpoint.tensors import CODES, Checksum
from slurmrl.tensors.layout import ITEM_BYTES, Array, TensorSpec
from slurmrl.tensors.weights.format import (
    DELTA,
    MANIFEST,
    RAW,
    SAME,
    PartFile,
    PartIndex,
    StoredTensor,
    VersionId,
    VersionManifest,
    compress_delta,
    part_file,
    part_index,
    read_manifest,
    write_record,
)


@dataclass(frozen=True)
class VersionBits:
    """The bits of a version's tensors that a rank owns, in host memory."""

    version: VersionId
    tensors: Mapping[str, Array]
    """Bits of each tensor, as a flat array of uint8."""


class PartWriter:
    """Writes the tensors that one rank owns into the directory of a version.

    The directory has the name of the version. Each tensor belongs to one part. A part that is not
    finished, or whose writing failed, does not belong to a version. As a context manager, the
    writer removes the file of such a part.
    """

    def __init__(
        self,
        folder: Path,
        part: int,
        base: VersionBits | None = None,
        *,
        frozen: str | None = None,
        calls: SystemCalls = REAL,
    ) -> None:
        """Open the file of a part. With ``base``, write deltas from these bits.

        ``frozen`` is the fingerprint in the manifest. Raises EnvironmentFailure.
        """
        self._folder, self._part = folder, part
        self._base, self._frozen = base, frozen
        self._calls = calls
        self._path = folder / part_file(part)
        self._tensors: dict[str, StoredTensor] = {}
        self._size = 0
        self._finished = False
        atomic.make_private_directory(folder, calls=calls)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            self._descriptor: int | None = calls.open(self._path, flags, FILE_MODE)
            make_private(self._descriptor, calls)
        except OSError as error:
            raise explain(error, "write", self._path) from error

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()

    def add(self, name: str, dtype: str, shape: Sequence[int], bits: Array) -> StoredTensor:
        """Write a tensor; ``bits`` is a flat, contiguous array of uint8.

        Raises EnvironmentFailure; the part is then abandoned.
        """
        spec = TensorSpec(tuple(shape), dtype)
        assert dtype in CODES, f"{name} has the unknown type {dtype}"
        assert bits.dtype == np.uint8, name
        assert bits.shape == (spec.bytes,), name
        assert name not in self._tensors, name
        encoding, stored = self._encoded(name, dtype, bits)
        found = str(Checksum(bits.data))
        if encoding == SAME:
            tensor = StoredTensor(name, dtype, spec.shape, SAME, found)
        else:
            own = found if encoding == RAW else str(Checksum(stored))
            place = self._path.name, self._size, stored.nbytes
            tensor = StoredTensor(name, dtype, spec.shape, encoding, found, *place, own)
            self._write(stored)
        self._tensors[name] = tensor
        return tensor

    def finish(self) -> PartIndex:
        """Wait until the part is on disk, and write its index.

        Raises EnvironmentFailure; the part is then abandoned.
        """
        try:
            self._sync()
            file = PartFile(self._path.name, self._size)
            base = None if self._base is None else self._base.version.name
            tensors = tuple(self._tensors.values())
            index = PartIndex(self._part, file, tensors, base, self._frozen)
            write_record(self._folder / part_index(self._part), index, calls=self._calls)
        except EnvironmentFailure:
            self.abandon()
            raise
        self._finished = True
        return index

    def abandon(self) -> None:
        """Remove the file of an unfinished part; do nothing to a finished part."""
        if self._descriptor is not None:
            with suppress(OSError):
                self._calls.close(self._descriptor)
            self._descriptor = None
        if not self._finished:
            discard(self._path, self._calls)

    def _sync(self) -> None:
        assert self._descriptor is not None, "the part was finished or abandoned"
        descriptor = self._descriptor
        try:
            self._calls.fsync(descriptor)
            self._descriptor = None
            self._calls.close(descriptor)
        except OSError as error:
            raise explain(error, "write", self._path) from error

    def _encoded(self, name: str, dtype: str, bits: Array) -> tuple[str, memoryview]:
        base = None if self._base is None else self._base.tensors.get(name)
        if base is None or base.size != bits.size:
            return RAW, bits.data
        if np.array_equal(base, bits):
            return SAME, memoryview(b"")
        stored = compress_delta(bits, base, ITEM_BYTES[dtype])
        return (DELTA, memoryview(stored)) if len(stored) < bits.size else (RAW, bits.data)

    def _write(self, data: memoryview) -> None:
        assert self._descriptor is not None, "the part was finished or abandoned"
        try:
            pwrite_all(self._descriptor, data, self._size, self._calls)
        except OSError as error:
            self.abandon()
            raise explain(error, "write", self._path) from error
        self._size += data.nbytes


def publish(
    folder: Path,
    parts: Iterable[PartIndex],
    version: VersionId,
    base: VersionId | None,
    *,
    clock: Callable[[], float] = time.time,
    calls: SystemCalls = REAL,
) -> VersionManifest:
    """Make the parts in ``folder`` a version, durably.

    ``base`` is the published base version of deltas; None if all tensors are complete. Raises
    EnvironmentFailure, and WeightVersionError if parts do not match each other or the base.
    """
    assert folder.name == version.name, f"{folder} is not the folder of version {version}"
    ordered = sorted(parts, key=lambda part: part.part)
    tensors = [tensor for part in ordered for tensor in part.tensors]
    frozen = {part.frozen for part in ordered}
    if len(frozen) > 1:
        raise WeightVersionError(f"parts of version {version} belong to different frozen weights")
    manifest = VersionManifest(
        version,
        clock(),
        tuple(part.file for part in ordered),
        tuple(tensors),
        None if base is None else base.name,
        next(iter(frozen), None),
    )
    if len(manifest.by_name) != len(tensors):
        raise WeightVersionError(f"parts of version {version} have the same tensor twice")
    wrong = {part.base for part in ordered} - {None, manifest.base}
    if wrong:
        raise WeightVersionError(f"parts of {version} have the bases {wrong}, not {base}")
    if base is not None:
        _check_base(manifest, read_manifest(folder.parent / base.name, calls=calls))
    write_record(folder / MANIFEST, manifest, calls=calls)
    atomic.sync_directory(folder.parent, calls=calls)
    return manifest


def _check_base(manifest: VersionManifest, base: VersionManifest) -> None:
    if manifest.frozen != base.frozen:
        raise WeightVersionError(
            f"version {manifest.id} and its base {base.id} belong to different frozen weights"
        )
    known = {tensor.name: tensor.spec for tensor in base.tensors}
    for tensor in manifest.tensors:
        if tensor.encoding != RAW and known.get(tensor.name) != tensor.spec:
            raise WeightVersionError(
                f"the shape or type of '{tensor.name}' differs between version {manifest.id} and "
                f"its base {base.id}"
            )
