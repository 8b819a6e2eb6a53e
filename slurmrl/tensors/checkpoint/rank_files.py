"""The files of one role in a checkpoint, opened when they are needed."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurmrl.errors import CheckpointError, CorruptFileError
from slurmrl.fsio import documents
from slurmrl.fsio.shapes import COUNT, INTEGER, TEXT, Fields
from slurmrl.tensors.checkpoint.tensors import TensorFile
from slurmrl.tensors.layout.copy import Array

KEY = "slurmrl"
VERSION = 2
MOST_OPEN = 256
"""Files that are open at once; a process may often have 1,024 in all."""
_FIELDS: Fields = {
    "version": INTEGER,
    "role": TEXT,
    "rank": COUNT,
    "ranks": COUNT,
    "step": INTEGER,
}


def file_name(role: str, rank: int) -> str:
    return f"{role}.{rank}.safetensors"


@dataclass(frozen=True)
class ShardHeader:
    """The metadata of one rank's file."""

    role: str
    rank: int
    ranks: int
    step: int
    """Optimizer steps so far."""

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"))


class RankFiles:
    """The arrays of all ranks' files. Raises CheckpointError or CorruptFileError for a file that is
    missing or does not belong here, EnvironmentFailure for one that cannot be read."""

    def __init__(self, directory: Path, role: str) -> None:
        self._directory = directory
        self._role = role
        self.origin: tuple[int, int] | None = None
        """The number of ranks and the step that all files must be of; None until it is known."""
        self._files: dict[int, TensorFile] = {}
        self._kinds: list[TensorFile] = []
        """The first of those that have the same arrays."""
        self._open: OrderedDict[int, None] = OrderedDict()
        """The ranks whose files are open; the one that was used last is at the end."""

    def header(self, rank: int, fields: Fields = _FIELDS) -> dict[str, Any]:
        """The metadata of a rank's file, with these fields."""
        return _header(self._file(rank), fields)

    def has(self, rank: int, array: str) -> bool:
        return array in self._file(rank).specs

    def array(self, rank: int, name: str) -> Array:
        """An array of a rank's file, flat; to be copied before an array of another file is read."""
        file = self._file(rank)
        try:
            found = file.flat(name)
        except KeyError as error:
            raise CheckpointError(f"{file.path} has no array '{name}'") from error
        return found

    def release(self) -> None:
        """Give back the memory of what was read."""
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
        values = _header(file, _FIELDS)
        if (values["role"], values["rank"]) != (self._role, rank):
            label = f"{values['role']} rank {values['rank']}"
            raise CheckpointError(f"{file.path} is labelled {label}")
        origin = values["ranks"], values["step"]
        if self.origin not in (None, origin):
            raise CheckpointError(
                f"{file.path} is of (ranks, step) {origin}, the checkpoint of {self.origin}"
            )
        self.origin = origin
        for other in self._kinds:  # thousands of files with thousands of arrays fill the memory
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
