"""The part files of a step or an evaluation, with one line about each item.

Ranks write them, and the master reads them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from slurmrl.backoff import READ_S, retry
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio import documents
from slurmrl.fsio.atomic import make_private_directory, replace
from slurmrl.fsio.calls import REAL
from slurmrl.fsio.failures import corrupt, unreadable
from slurmrl.fsio.primitives import opened
from slurmrl.fsio.shapes import SIZE, Fields, table
from slurmrl.plan.dataflow import Record
from slurmrl.run.metrics import encode
from slurmrl.run.paths import RunPaths

LINE: Final[Fields] = {"place": SIZE, "record": table({})}


def write_part(
    path: Path, records: Mapping[str, Record], own: Sequence[str], batch: Sequence[str]
) -> None:
    """Write the lines about a rank's ``own`` items durably, each with its place in the ``batch``.

    The file is complete or absent.

    Raises ValueError if there is not one line for each item, EnvironmentFailure if the file cannot
    be written for `READ_S`.
    """
    if records.keys() != set(own):
        odd = sorted(records.keys() ^ set(own))[:3]
        raise ValueError(f"the records are not those of this rank's items: {', '.join(odd)}")
    place_of = {name: place for place, name in enumerate(batch)}
    lines = sorted((place_of[name], record) for name, record in records.items())
    data = b"".join(encode({"place": place, "record": record}) for place, record in lines)

    def write() -> None:
        make_private_directory(path.parent)
        replace(path, data)

    retry("record the results", write, timeout_s=READ_S)


def read_parts(paths: RunPaths, prefix: str, numbers: Iterable[int]) -> list[Record]:
    """Return the records of a step, in the order of its batch, from its part files.

    They are the files with these ``numbers`` whose names begin with ``prefix``.

    Raises CorruptFileError for files that are missing or damaged, EnvironmentFailure.
    """
    lines = [line for number in numbers for line in _lines(paths.part(prefix, number))]
    lines.sort(key=_place)
    if [_place(line) for line in lines] != list(range(len(lines))):
        raise corrupt(paths.parts / prefix, "has an item twice or lacks one")
    return [line["record"] for line in lines]


def _place(line: Mapping[str, Any]) -> int:
    place: int = line["place"]
    return place


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Raises CorruptFileError, EnvironmentFailure."""
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
