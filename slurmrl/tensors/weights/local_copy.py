"""The copy of one weight version on a rollout host, which all its processes share.

It is a model folder's safetensors file on tmpfs or a local disk: engines map it, servers load it.
That of a version of adapters is first merged with the frozen weights (`rollout.task_weights`).
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
from filelock import FileLock, Timeout

from slurmrl import log
from slurmrl.errors import (
    CheckpointError,
    CorruptFileError,
    EnvironmentFailure,
    WaitTimeoutError,
    WeightVersionError,
)
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.failures import cause, explain
from slurmrl.fsio.shapes import FILE_NAME
from slurmrl.tensors.checkpoint.checksums import checksum
from slurmrl.tensors.checkpoint.tensors import SavedFile, TensorEntry, TensorFile, write_tensors
from slurmrl.tensors.layout.copy import Array
from slurmrl.tensors.weights.reader import VersionFiles, resolved
from slurmrl.tensors.weights.version import (
    VersionId,
    VersionManifest,
    read_record,
    version_ids,
    write_record,
)

FILE = "model.safetensors"
STATE = "state.json"
LOCK = "lock"
LOCK_TIMEOUT_S = 1800.0
"""Longer than any update of a copy takes."""
logger = log.get(__name__)


@dataclass(frozen=True)
class CopyState:
    """The state of a copy. It is replaced when a new file is complete."""

    id: VersionId
    versions: str
    """Where it came from: versions of another trial have the same names."""
    folder: Annotated[str, FILE_NAME]
    file: SavedFile
    frozen: str | None = None
    """That of the version's manifest."""


@dataclass(frozen=True)
class CopiedVersion:
    """A version that a host holds."""

    id: VersionId
    folder: Path
    """A model folder with the weights only, or with the adapters only."""
    frozen: str | None = None
    """That of the version's manifest."""

    @property
    def file(self) -> Path:
        return self.folder / FILE

    def open(self) -> TensorFile:
        """Map the weights. They stay readable when the copy moves on. Raises WeightVersionError if
        it has moved on already: `LocalCopy.advance` returns the newer one."""
        try:
            return TensorFile(self.file)
        except (CheckpointError, EnvironmentFailure) as error:
            if isinstance(error, EnvironmentFailure) and cause(error) != errno.ENOENT:
                raise
            raise WeightVersionError(f"the copy is no longer at version {self.id}") from error


class LocalCopy:
    """The copy in ``folder`` of the versions in ``versions``. One process at a time changes it.

    A new version gets a new file, so that nobody reads a mixture; for that time the host stores the
    weights twice. A killed process leaves the old version in place.
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
        """The folder of the version whose checksum this process has seen to be right."""

    def held(self) -> CopiedVersion | None:
        """The version that the host holds; None if there is none. Raises EnvironmentFailure."""
        state = self._state()
        return None if state is None else self._copied(state)

    def advance(self, to: VersionId | None = None) -> CopiedVersion:
        """Bring the copy to ``to``, or to the newest version. It never goes back.

        A later version is returned if the copy has it already, or if ``to`` cannot be read:
        then the newest later one that is whole. Raises WeightVersionError if there is none, which
        leaves the copy as it is, EnvironmentFailure, and WaitTimeoutError if another process has
        been changing the copy for too long.
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
                    logger.warning("cannot take weight version %s: %s", version, error)
                patient = False
        if state is not None and to is None:
            return self._copied(state)
        wanted = (
            "no weight version" if to is None else f"neither weight version {to} nor a later one"
        )
        reasons = "; ".join(dict.fromkeys(problems)) or "nothing was published"
        raise WeightVersionError(f"{wanted} in {self._versions} can be read: {reasons}")

    def _candidates(self, to: VersionId | None) -> Iterator[tuple[VersionId, bool, bool]]:
        """The versions to try, whether only a whole one will do, and whether to wait for what is
        not there: not for a version that was removed. What is published meanwhile is tried too."""
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
        """Write the file of a version, from the one that is held or from a whole one."""
        with VersionFiles(self._versions, patient=patient, calls=self._calls) as files:
            chain = files.chain(version, None if held is None else held.id)
            if whole and chain[-1].base is not None:
                raise WeightVersionError(f"version {version} is not whole")
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
            logger.warning("the copy is given up: %s", error)
            return None
        return state if state.versions == str(self._versions) else None

    def _sound_state(self) -> CopyState | None:
        """The state, if its file is as it says; the checksum is compared once in a process."""
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
        """Remove files of other versions, which killed processes left as well."""
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
