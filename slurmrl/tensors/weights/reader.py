"""Readers' side of weight versions: the chain that leads to a version, and a tensor's bits from it.

Stored bytes are verified before they are used, and bits after every difference.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np

from slurmrl.backoff import HIDDEN_PAUSES_S, attempts
from slurmrl.errors import WeightVersionError
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.failures import NO_FILE, explain
from slurmrl.tensors.layout.copy import Array
from slurmrl.tensors.layout.layout import ITEM_BYTES
from slurmrl.tensors.weights import delta
from slurmrl.tensors.weights.version import (
    DELTA,
    RAW,
    StoredTensor,
    VersionId,
    VersionManifest,
    read_manifest,
)
from slurmrl.tensors.weights.writer import digest

MOST_OPEN = 256
"""Files that are open at once; a process may often have 1,024 in all."""
READ_BYTES = 4 << 20
"""Read at a time."""
_OTHERS_MAY_BE_FINE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EIO, *NO_FILE})
"""Errors that concern one file: those of another version may be readable."""
T = TypeVar("T")


class VersionFiles:
    """The files of the versions in a directory. Used as a context: it keeps files open.

    A ``patient`` one repeats, for about a minute, what looks damaged or missing, if this host may
    see an old state of the directory.
    """

    def __init__(self, folder: Path, *, patient: bool = False, calls: SystemCalls = REAL) -> None:
        self._folder = folder
        self._calls = calls
        self._pauses_s = HIDDEN_PAUSES_S if patient and calls.caches(folder) else ()
        self._open: OrderedDict[Path, int] = OrderedDict()
        """Descriptors; the one that was used last is at the end."""

    def __enter__(self) -> VersionFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for path in list(self._open):
            self._close(path)

    def manifest(self, version: VersionId) -> VersionManifest:
        """Raises WeightVersionError, EnvironmentFailure."""
        folder = self._folder / version.name
        return self._patiently(lambda: read_manifest(folder, calls=self._calls))

    def chain(self, to: VersionId, held: VersionId | None = None) -> list[VersionManifest]:
        """The versions that lead to ``to``, in the order in which they are applied: the first one
        is whole, or a difference from ``held``. Raises WeightVersionError, EnvironmentFailure."""
        found = [self.manifest(to)]
        while found[-1].base is not None:
            base = VersionId.parse(found[-1].base)
            if base == held:
                break
            if not base < found[-1].id:
                raise WeightVersionError(f"version {found[-1].id} has the later base {base}")
            found.append(self.manifest(base))
        return found[::-1]

    def stored(self, version: VersionId, tensor: StoredTensor) -> Array:
        """The stored bytes of a tensor, verified. Raises WeightVersionError,
        EnvironmentFailure."""
        path = self._folder / version.name / tensor.file
        return self._patiently(lambda: self._verified(path, tensor))

    def _patiently(self, look: Callable[[], T]) -> T:
        for last in attempts(self._pauses_s, lambda pause_s: self._calls.sleep(pause_s)):
            try:
                return look()
            except WeightVersionError:
                if last:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _verified(self, path: Path, tensor: StoredTensor) -> Array:
        try:
            data = self._read(path, tensor)
        except OSError as error:
            self._close(path)
            if error.errno in _OTHERS_MAY_BE_FINE:
                reason = os.strerror(error.errno or 0)
                raise WeightVersionError(f"{path} cannot be read: {reason}") from error
            raise explain(error, "read", path) from error
        if digest(data.data) != tensor.stored_checksum:
            self._close(path)  # a new handle may see what this one does not
            raise WeightVersionError(f"{path}: '{tensor.name}' has another checksum")
        return data

    def _read(self, path: Path, tensor: StoredTensor) -> Array:
        """The bytes of a tensor; those behind the end of a cut file are missing."""
        descriptor = self._descriptor(path)
        data = np.empty(tensor.bytes, np.uint8)
        begin = 0
        while begin < data.size:
            count = min(READ_BYTES, data.size - begin)
            piece = self._calls.pread(descriptor, count, tensor.offset + begin)
            if not piece:
                return data[:begin]
            data[begin : begin + len(piece)] = np.frombuffer(piece, np.uint8)
            begin += len(piece)
        return data

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            self._open[path] = self._calls.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        self._open.move_to_end(path)
        if len(self._open) > MOST_OPEN:
            self._close(next(iter(self._open)))
        return self._open[path]

    def _close(self, path: Path) -> None:
        descriptor = self._open.pop(path, None)
        if descriptor is not None:
            with suppress(OSError):
                self._calls.close(descriptor)


def resolved(
    files: VersionFiles,
    chain: Sequence[VersionManifest],
    name: str,
    held: Callable[[str], Array] | None = None,
) -> Array:
    """The bits of a tensor in the last version of a chain, as a flat array of uint8.

    ``held`` returns those of the version before the chain. Raises WeightVersionError if anything is
    not as its manifest says, EnvironmentFailure.
    """
    layers = [(manifest.id, _tensor(manifest, name)) for manifest in chain]
    whole = [place for place, (_, tensor) in enumerate(layers) if tensor.encoding == RAW]
    if whole:
        first, layers = layers[whole[-1]], layers[whole[-1] + 1 :]
        bits, found = files.stored(*first), first[1].checksum
    elif held is None:
        raise WeightVersionError(f"'{name}' is in no whole version of {_named(chain)}")
    else:
        bits = held(name).copy()
        found = digest(bits.data)
    for version, tensor in layers:
        if bits.size != tensor.spec.bytes:
            raise WeightVersionError(f"'{name}' of version {version} has another size than before")
        if tensor.encoding == DELTA:
            delta.apply(files.stored(version, tensor).data, bits, ITEM_BYTES[tensor.dtype])
            found = digest(bits.data)
        if found != tensor.checksum:
            raise WeightVersionError(f"'{name}' of version {version} has another checksum")
    return bits


def _tensor(manifest: VersionManifest, name: str) -> StoredTensor:
    try:
        return manifest.by_name[name]
    except KeyError as error:
        raise WeightVersionError(f"version {manifest.id} has no '{name}'") from error


def _named(chain: Sequence[VersionManifest]) -> str:
    return ", ".join(manifest.id.name for manifest in chain)
