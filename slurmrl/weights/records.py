"""The records of weight versions: JSON objects with a checksum, replaced atomically.

The checksum covers the content, so that a damaged name or shape is found as surely as damaged
weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from slurmrl.checkpoint.checksums import Checksum
from slurmrl.errors import CorruptFileError, WeightVersionError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.objects import Dataclass, from_json, to_json
from slurmrl.fsio.shapes import INTEGER, TEXT, Fields, FieldType
from slurmrl.weights.version import PartIndex, VersionId, VersionManifest

FORMAT = 2
READABLE = (1, 2)
"""Records of format 1 have all weights of a model. Its readers would take adapters for these."""
MANIFEST = "manifest.json"
_CONTENT = FieldType("an object", lambda value: isinstance(value, dict))
_FIELDS: Fields = {"format": INTEGER, "checksum": TEXT, "content": _CONTENT}
R = TypeVar("R", bound=Dataclass)


def part_file(part: int) -> str:
    return f"part-{part}.bin"


def part_index(part: int) -> str:
    return f"part-{part}.json"


def write_record(path: Path, record: Dataclass, *, calls: SystemCalls = REAL) -> None:
    """Replace a record durably. Raises EnvironmentFailure."""
    content = to_json(record)
    values = {"format": FORMAT, "checksum": _checksum(content), "content": content}
    atomic.replace(path, (_text(values) + "\n").encode(), calls=calls)


def read_record(path: Path, kind: type[R], *, calls: SystemCalls = REAL) -> R:
    """Raises FileNotFoundError, CorruptFileError, EnvironmentFailure."""
    values = documents.read(path, _FIELDS, _FIELDS, calls=calls)
    if values["format"] not in READABLE:
        raise CorruptFileError(
            f"{path} has format {values['format']}; this program reads formats up to {FORMAT}"
        )
    if values["checksum"] != _checksum(values["content"]):
        raise CorruptFileError(f"{path} has another checksum")
    return from_json(kind, values["content"], path)


def read_part(folder: Path, part: int, *, calls: SystemCalls = REAL) -> PartIndex:
    """The index of a part that its rank has finished. Raises WeightVersionError,
    EnvironmentFailure."""
    return _read(folder / part_index(part), PartIndex, calls)


def read_manifest(folder: Path, *, calls: SystemCalls = REAL) -> VersionManifest:
    """The manifest of a published version. Raises WeightVersionError if there is none or it is
    damaged, EnvironmentFailure if it cannot be read."""
    manifest = _read(folder / MANIFEST, VersionManifest, calls)
    if manifest.id.name != folder.name:
        raise WeightVersionError(f"{folder / MANIFEST} is that of version {manifest.id}")
    return manifest


def version_ids(folder: Path, *, calls: SystemCalls = REAL) -> list[VersionId]:
    """The versions that have a directory in ``folder``, published or not, from old to new. Raises
    EnvironmentFailure."""
    found = []
    try:
        names = atomic.list_names(folder, calls=calls)
    except FileNotFoundError:  # nothing was published yet
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
    found = Checksum()
    found.update(_text(content).encode())
    return str(found)


def _text(values: dict[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False)
