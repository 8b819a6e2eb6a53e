"""Files of JSON lines with the completions or rows of each step.

``samples/`` has readable samples. Each incarnation writes separate files. The files
``step-<s>.<incarnation>.jsonl`` for training and ``eval-step-<s>.<incarnation>.jsonl`` for
evaluations contain step ``s`` and later steps. ``<s>.<incarnation>.index`` has the place of each
step in these files. The ``s`` of an index is the first step of its incarnation. Earlier versions
wrote one file per step, ``step-<s>.jsonl``.

Part files have one line for each item of a step or an evaluation. Ranks write part files, and the
master reads them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from slurmrl.backoff import READ_S, retry
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.atomic import make_private_directory, replace
from slurmrl.fsio.calls import REAL, SystemCalls, corrupt, opened, unreadable
from slurmrl.fsio.documents import FILE_NAME, SIZE, Fields, table
from slurmrl.run.metrics import encode
from slurmrl.run.paths import RunPaths

FILE_BYTES = 64 << 20
"""Size in bytes of a file after which later steps go to another file."""
FIELDS: Fields = {"step": SIZE, "file": FILE_NAME, "start": SIZE, "stop": SIZE}
"""The fields of a line of an index. The bytes from ``start`` to ``stop`` of the file are the step's
samples."""
_INDEX = re.compile(r"([0-9]{8,})\.([0-9]+)\.index")


class SamplePlace(NamedTuple):
    """The bytes of a file that hold the samples of a step; by default the whole file."""

    path: Path
    start: int = 0
    stop: int | None = None


class KeptSampleWriter:
    """Writes the samples of an incarnation that begins with the step ``first``.

    The methods raise EnvironmentFailure. The caller can then repeat the call.
    """

    def __init__(
        self, folder: Path, incarnation: int, first: int, *, calls: SystemCalls = REAL
    ) -> None:
        self._folder = folder
        self._incarnation = incarnation
        self._calls = calls
        self._index = self._new_file(f"{first:08d}", "index")
        self._files: dict[str, documents.LineWriter] = {}

    def begin(self) -> None:
        """Create the index, which replaces earlier incarnations' samples from step ``first`` on."""
        self._append(self._index, b"")

    def write(self, step: int, rows: bytes, *, evaluation: bool) -> None:
        """Write the lines of a step. Readers find the lines once the index names them."""
        prefix = _prefix(evaluation)
        file = self._files.get(prefix)
        if file is None or file.size >= FILE_BYTES:
            file = self._files[prefix] = self._new_file(f"{prefix}{step:08d}", "jsonl")
        start = self._append(file, rows)
        place = {"file": file.path.name, "start": start, "stop": start + len(rows)}
        self._append(self._index, encode({"step": step, **place}))

    def _new_file(self, name: str, suffix: str) -> documents.LineWriter:
        path = self._folder / f"{name}.{self._incarnation}.{suffix}"
        return documents.LineWriter(path, calls=self._calls)

    def _append(self, file: documents.LineWriter, data: bytes) -> int:
        """Append to a file; recreate its folder if a user or a purge has removed the folder."""
        atomic.make_private_directory(self._folder, calls=self._calls)
        return file.write(data)


def places(folder: Path, *, evaluation: bool) -> dict[int, SamplePlace]:
    """Return the place of the samples of each step, in the order of the steps.

    For a step that was trained again, the samples of the newest incarnation count. Raises
    EnvironmentFailure.
    """
    try:
        names = set(atomic.list_names(folder))
    except FileNotFoundError:
        return {}
    prefix = _prefix(evaluation)
    of_step = re.compile(rf"{prefix}([0-9]{{8,}})\.jsonl")
    old = sorted((int(match[1]), match[0]) for match in map(of_step.fullmatch, names) if match)
    found = {step: SamplePlace(folder / name) for step, name in old}
    matches = [match for match in map(_INDEX.fullmatch, names) if match]
    for match in sorted(matches, key=lambda match: int(match[2])):
        while found and next(reversed(found)) >= int(match[1]):
            found.popitem()
        for line in _lines(folder / match[0]):
            if line["file"] in names and line["file"].startswith(prefix):
                path = folder / line["file"]
                found[line["step"]] = SamplePlace(path, line["start"], line["stop"])
    return found


def _lines(index: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of an index. Skip lines that a kill or a full disk has cut off."""
    with suppress(FileNotFoundError), documents.opened(index) as file:
        for raw in file.forward():
            with suppress(CorruptFileError):
                yield documents.parse(raw, index, FIELDS, FIELDS)


def _prefix(evaluation: bool) -> str:
    return "eval-step-" if evaluation else "step-"


LINE: Final[Fields] = {"place": SIZE, "record": table({})}


def write_part(
    path: Path, records: Mapping[str, Mapping[str, Any]], own: Sequence[str], batch: Sequence[str]
) -> None:
    """Write one line for each of a rank's ``own`` items durably, with its place in the ``batch``.

    The file is complete or absent.

    Raises ValueError if ``records`` lacks one of the items or has additional items. Raises
    EnvironmentFailure if the file cannot be written for `READ_S` seconds.
    """
    if records.keys() != set(own):
        odd = sorted(records.keys() ^ set(own))[:3]
        raise ValueError(f"the records do not match this rank's items: {', '.join(odd)}")
    place_of = {name: place for place, name in enumerate(batch)}
    rows = sorted((place_of[name], record) for name, record in records.items())
    data = b"".join(encode({"place": place, "record": record}) for place, record in rows)

    def write() -> None:
        make_private_directory(path.parent)
        replace(path, data)

    retry("record the results", write, timeout_s=READ_S)


def read_parts(paths: RunPaths, prefix: str, numbers: Iterable[int]) -> list[Mapping[str, Any]]:
    """Return the records in the part files ``prefix`` with these ``numbers``, in batch order.

    Raises EnvironmentFailure, and CorruptFileError for missing or damaged files.
    """
    found = [line for number in numbers for line in _part_lines(paths.part(prefix, number))]
    found.sort(key=_place)
    if [_place(line) for line in found] != list(range(len(found))):
        raise corrupt(paths.parts / prefix, "has an item twice or lacks one")
    return [line["record"] for line in found]


def _place(line: Mapping[str, Any]) -> int:
    place: int = line["place"]
    return place


def _part_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a part file. Raises CorruptFileError, EnvironmentFailure."""
    try:
        with (
            opened(path, os.O_RDONLY | os.O_NOFOLLOW, REAL) as descriptor,
            os.fdopen(descriptor, "rb", closefd=False) as file,
        ):
            for raw in file:
                yield documents.parse(raw, path, LINE, LINE)
    except FileNotFoundError as error:
        raise corrupt(path, "is missing") from error
    except EnvironmentFailure:
        raise
    except OSError as error:
        raise unreadable(error, path) from error
