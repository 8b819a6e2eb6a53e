"""The copy of one weight version on a rollout host. All processes of the host share the copy.

The copy is a model folder's safetensors file on tmpfs or a local disk, which engines map and
servers load. Adapters are merged with the frozen weights first (`workers.rollout.task_weights`).
`VersionFiles` reads the chain of versions from which a version is made. It verifies stored bytes
before their use, and the bits of a tensor after every delta.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Annotated, TypeVar

import numpy as np
from filelock import FileLock, Timeout

from slurmrl import log
from slurmrl.backoff import HIDDEN_PAUSES_S, attempts
from slurmrl.errors import (
    CheckpointError,
    CorruptFileError,
    EnvironmentFailure,
    WaitTimeoutError,
    WeightVersionError,
)
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import NO_FILE, REAL, SystemCalls, cause, explain
from slurmrl.fsio.documents import FILE_NAME
from slurmrl.tensors.checkpoint.tensors import (
    Checksum,
    SavedFile,
    TensorEntry,
    TensorFile,
    checksum,
    write_tensors,
)
from slurmrl.tensors.layout import ITEM_BYTES, Array
from slurmrl.tensors.weights.format import (
    DELTA,
    RAW,
    StoredTensor,
    VersionId,
    VersionManifest,
    apply_delta,
    read_manifest,
    read_record,
    version_ids,
    write_record,
)

FILE = "model.safetensors"
STATE = "state.json"
LOCK = "lock"
LOCK_TIMEOUT_S = 1800.0
"""Time limit for waiting for the lock, which is longer than any update of a copy."""
MOST_OPEN = 256
"""Maximum number of files that are open at once; the limit of a process is often 1,024."""
READ_BYTES = 4 << 20
"""Number of bytes that are read at a time."""
_OTHERS_MAY_BE_FINE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EIO, *NO_FILE})
"""Errors that concern a single file. Files of another version may still be readable."""
logger = log.get(__name__)


@dataclass(frozen=True)
class CopyState:
    """The state of a copy, which is replaced when a new file is complete."""

    id: VersionId
    versions: str
    """Folder of the versions. (Versions of another trial have the same names.)"""
    folder: Annotated[str, FILE_NAME]
    file: SavedFile
    frozen: str | None = None
    """Fingerprint of frozen weights, as in `VersionManifest`."""


@dataclass(frozen=True)
class CopiedVersion:
    """The version in a host's copy."""

    id: VersionId
    folder: Path
    """Model folder with only the weights, or only the adapters."""
    frozen: str | None = None
    """Fingerprint of frozen weights, as in `VersionManifest`."""

    @property
    def file(self) -> Path:
        return self.folder / FILE

    def open(self) -> TensorFile:
        """Map the weights, which remain readable when the copy gets a newer version.

        Raises WeightVersionError if the copy already has a newer version, which `LocalCopy.advance`
        returns.
        """
        try:
            return TensorFile(self.file)
        except (CheckpointError, EnvironmentFailure) as error:
            if isinstance(error, EnvironmentFailure) and cause(error) != errno.ENOENT:
                raise
            raise WeightVersionError(f"the copy is no longer at version {self.id}") from error


class LocalCopy:
    """The copy in ``folder`` of a version in ``versions``. One process at a time changes the copy.

    A new version gets a new file, so that no process reads a mixture. During an update, the host
    stores the weights twice. If the process is killed, the old version stays.
    """

    def __init__(
        self,
        folder: Path,
        versions: Path,
        *,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
        calls: SystemCalls = REAL,
    ) -> None:
        self._folder, self._versions = folder, versions
        self._lock_timeout_s = lock_timeout_s
        self._calls = calls
        self._verified = ""
        """Folder of the version whose checksum this process has verified."""

    def held(self) -> CopiedVersion | None:
        """Return the version in the copy; None if there is none. Raises EnvironmentFailure."""
        state = self._state()
        return None if state is None else self._copied(state)

    def advance(self, to: VersionId | None = None) -> CopiedVersion:
        """Update the copy to ``to``, or to the newest version; return the version in the copy.

        A copy with a later version does not change. If ``to`` cannot be read, the copy gets the
        newest later full version.

        Raises WeightVersionError if no version can be read (the copy is then unchanged),
        EnvironmentFailure, and WaitTimeoutError if another process changes the copy for too long.
        """
        atomic.make_private_directory(self._folder, calls=self._calls)
        with self._locked():
            state = self._sound_state()
            self._sweep(state)
            if state is not None and to is not None and not state.id < to:
                return self._copied(state)
            return self._advance(state, to)

    def _copied(self, state: CopyState) -> CopiedVersion:
        return CopiedVersion(state.id, self._folder / state.folder, state.frozen)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(self._folder / LOCK, timeout=self._lock_timeout_s, mode=0o600)
        try:
            lock.acquire()
        except Timeout as error:
            raise WaitTimeoutError(
                f"another process has been changing {self._folder} for more than "
                f"{self._lock_timeout_s:.0f} s; its lock is {error.lock_file}"
            ) from error
        try:
            yield
        finally:
            lock.release()

    def _advance(self, state: CopyState | None, to: VersionId | None) -> CopiedVersion:
        problems: list[str] = []
        for version, whole, patient in self._candidates(to):
            if state is not None and not state.id < version:
                break
            for held in (state, None) if state is not None and not whole else (None,):
                try:
                    return self._build(version, held, whole=whole, patient=patient)
                except WeightVersionError as error:
                    problems.append(str(error))
                    logger.warning("cannot copy weight version %s: %s", version, error)
                patient = False
        if state is not None and to is None:
            return self._copied(state)
        wanted = "no weight version" if to is None else f"neither version {to} nor a later version"
        reasons = "; ".join(dict.fromkeys(problems)) or "nothing was published"
        raise WeightVersionError(f"{wanted} in {self._versions} can be read: {reasons}")

    def _candidates(self, to: VersionId | None) -> Iterator[tuple[VersionId, bool, bool]]:
        """Yield (version, must be full, wait for missing files) for the versions to try.

        Include versions that are published during the iteration. The last flag is false for a
        removed version.
        """
        known = version_ids(self._versions, calls=self._calls)
        tried: set[VersionId] = set()
        if to is not None:
            yield to, False, to in known or not any(to < one for one in known)
            tried = {one for one in known if one < to} | {to}
        while left := [one for one in known if one not in tried]:
            for version in reversed(left):
                yield version, to is not None, False
            tried.update(left)
            known = version_ids(self._versions, calls=self._calls)

    def _build(
        self, version: VersionId, held: CopyState | None, *, whole: bool, patient: bool
    ) -> CopiedVersion:
        """Write the file of a version, from the version ``held`` or from a full version."""
        with VersionFiles(self._versions, patient=patient, calls=self._calls) as files:
            chain = files.chain(version, None if held is None else held.id)
            if whole and chain[-1].base is not None:
                raise WeightVersionError(f"version {version} is stored as a delta")
            folder = self._folder / f"{version}-{uuid.uuid4().hex[:8]}"
            try:
                saved = self._write(folder, files, chain, held)
            except (WeightVersionError, EnvironmentFailure):
                shutil.rmtree(folder, ignore_errors=True)
                raise
        versions, frozen = str(self._versions), chain[-1].frozen
        state = CopyState(version, versions, folder.name, saved, frozen)
        write_record(self._folder / STATE, state, calls=self._calls)
        self._verified = folder.name
        self._sweep(state)
        return self._copied(state)

    def _write(
        self,
        folder: Path,
        files: VersionFiles,
        chain: list[VersionManifest],
        held: CopyState | None,
    ) -> SavedFile:
        old = None if held is None else self._opened(held)
        bits = None if old is None else partial(_bits, old)
        entries = [
            TensorEntry(one.name, one.spec, partial(resolved, files, chain, one.name, bits))
            for one in chain[-1].tensors
        ]
        atomic.make_private_directory(folder, calls=self._calls)
        try:
            return write_tensors(folder / FILE, entries, {"format": "pt"}, calls=self._calls)
        finally:
            if old is not None:
                old.close()

    def _opened(self, held: CopyState) -> TensorFile:
        try:
            return TensorFile(self._folder / held.folder / FILE)
        except (CheckpointError, CorruptFileError) as error:
            raise WeightVersionError(f"the copy is damaged: {error}") from error

    def _state(self) -> CopyState | None:
        try:
            state = read_record(self._folder / STATE, CopyState, calls=self._calls)
        except FileNotFoundError:
            return None
        except CorruptFileError as error:
            logger.warning("slurmrl copies the weights again: %s", error)
            return None
        return state if state.versions == str(self._versions) else None

    def _sound_state(self) -> CopyState | None:
        """Return the state if the file matches; a process compares a file's checksum only once."""
        state = self._state()
        if state is None or state.folder == self._verified:
            return state
        path = self._folder / state.folder / FILE
        try:
            with os.fdopen(self._calls.open(path, os.O_RDONLY), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                right = size == state.file.size and checksum(file) == state.file.checksum
        except FileNotFoundError:
            right = False
        except OSError as error:
            raise explain(error, "read", path) from error
        if not right:
            logger.warning("the copy of weight version %s is damaged: %s", state.id, path)
            return None
        self._verified = state.folder
        return state

    def _sweep(self, state: CopyState | None) -> None:
        """Remove files of other versions, including files that killed processes left."""
        keep = {STATE, LOCK, "" if state is None else state.folder}
        for name in atomic.list_names(self._folder, calls=self._calls):
            if name not in keep:
                shutil.rmtree(self._folder / name, ignore_errors=True)
        atomic.sweep_temporaries(self._folder, calls=self._calls)


def _bits(file: TensorFile, name: str) -> Array:
    try:
        return file.flat(name).view(np.uint8)
    except KeyError as error:
        raise WeightVersionError(f"the copy has no '{name}'") from error


T = TypeVar("T")


class VersionFiles:
    """The files of the versions in a directory. As a context manager, it closes files at the end.

    With ``patient``, failed reads are repeated for about a minute if this host may see an old state
    of the directory.
    """

    def __init__(self, folder: Path, *, patient: bool = False, calls: SystemCalls = REAL) -> None:
        self._folder = folder
        self._calls = calls
        self._pauses_s = HIDDEN_PAUSES_S if patient and calls.caches(folder) else ()
        self._open: OrderedDict[Path, int] = OrderedDict()
        """Descriptors, from the least to the most recently used."""

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
        """Return the manifest of a version. Raises WeightVersionError, EnvironmentFailure."""
        folder = self._folder / version.name
        return self._patiently(lambda: read_manifest(folder, calls=self._calls))

    def chain(self, to: VersionId, held: VersionId | None = None) -> list[VersionManifest]:
        """Return the versions from which ``to`` is made, in the order of their application.

        The first version is full, or has the base ``held``. Raises WeightVersionError,
        EnvironmentFailure.
        """
        found = [self.manifest(to)]
        while found[-1].base is not None:
            base = VersionId.parse(found[-1].base)
            if base == held:
                break
            if not base < found[-1].id:
                raise WeightVersionError(f"base {base} of version {found[-1].id} is not older")
            found.append(self.manifest(base))
        return found[::-1]

    def stored(self, version: VersionId, tensor: StoredTensor) -> Array:
        """Return the verified stored bytes of a tensor.

        Raises WeightVersionError, EnvironmentFailure.
        """
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
        if str(Checksum(data.data)) != tensor.stored_checksum:
            self._close(path)  # A new descriptor may show newer data.
            raise WeightVersionError(f"{path}: '{tensor.name}' has another checksum")
        return data

    def _read(self, path: Path, tensor: StoredTensor) -> Array:
        """Return the bytes of a tensor, fewer than expected if the file is truncated."""
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
    """Return the bits of a tensor in the last version of a chain, as a flat array of uint8.

    ``held`` returns the bits of a tensor in the version before the chain. Raises
    EnvironmentFailure, and WeightVersionError if bytes or bits do not match a manifest.
    """
    layers = [(manifest.id, _tensor(manifest, name)) for manifest in chain]
    whole = [place for place, (_, tensor) in enumerate(layers) if tensor.encoding == RAW]
    if whole:
        first, layers = layers[whole[-1]], layers[whole[-1] + 1 :]
        bits, found = files.stored(*first), first[1].checksum
    elif held is None:
        raise WeightVersionError(f"'{name}' is stored as a delta in all versions {_named(chain)}")
    else:
        bits = held(name).copy()
        found = str(Checksum(bits.data))
    for version, tensor in layers:
        if bits.size != tensor.spec.bytes:
            raise WeightVersionError(f"size of '{name}' changed between a base and {version}")
        if tensor.encoding == DELTA:
            apply_delta(files.stored(version, tensor).data, bits, ITEM_BYTES[tensor.dtype])
            found = str(Checksum(bits.data))
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
