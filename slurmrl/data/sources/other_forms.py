"""Files whose rows are not JSON: what they are, and how to convert them. Torch-free."""

from __future__ import annotations

import csv
import json
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final

from slurmrl.data.sources.base import unreadable

HEAD_BYTES: Final = 1 << 16
"""Maximum number of bytes to look at, from the start of a file."""
ALIKE: Final = 3
"""Maximum number of lines to compare with the first."""
SUFFIXES: Final = {".csv": ",", ".tsv": "\t"}
"""Separators of tables, by the suffix of the file."""
NAMES: Final = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}
POINTER: Final = "version https://git-lfs.github.com/"
NULS: Final = (
    "holds NUL bytes, which are no text: the file was not written to its end, or was damaged (a "
    "full disk, a crash); write it again"
)


def other_form(path: Path) -> str:
    """Return what a file is whose first row is not JSON; "" if that row has a mistake. Raises
    EnvironmentFailure."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    lines = head.decode("utf-8-sig", errors="replace").lstrip().splitlines()
    if not lines:  # white space only, as far as it was looked at
        return ""
    first = lines[0].rstrip()
    if first.startswith(POINTER):
        return "is a pointer of Git LFS, not the file: run git lfs pull in its folder"
    if first.startswith("<"):
        return "is HTML or XML, perhaps the error page of a download; get the file again"
    if first.startswith("{"):
        return _object_on_lines(first) if len(lines) > 1 else ""
    separator = _separator(lines) or SUFFIXES.get(path.suffix, "")
    return _table(separator) if separator else ""


def _object_on_lines(first: str) -> str:
    """Return the message for a line that is the beginning of an object."""
    try:
        json.loads(first)
    except json.JSONDecodeError as error:
        if error.pos == len(first):
            return (
                "begins with an object on several lines, but a row is one line: convert the file "
                "with jq -c . FILE > ROWS.jsonl (jq -c '.data[]' for rows in a list under 'data')"
            )
    return ""


def _separator(lines: list[str]) -> str:
    """Return what separates the cells of a table; "" for other text."""
    if any(line.startswith(("{", "[")) for line in lines[: ALIKE + 1]):
        return ""
    for separator in NAMES:
        with suppress(csv.Error):
            rows = csv.reader(lines, delimiter=separator, strict=True)
            cells = [len(row) for row in islice(rows, ALIKE + 1)]
            if len(cells) > 1 and cells[0] > 1 and len(set(cells)) == 1:
                return separator
    return ""


def _table(separator: str) -> str:
    """Return the message for a table, with a command that converts it."""
    more = "" if separator == "," else f", delimiter={separator!r}"
    program = (
        "import csv, json; [print(json.dumps(row)) for row in "
        f"csv.DictReader(open('FILE', newline='', encoding='utf-8-sig'){more})]"
    )
    return (
        f"is a table with {NAMES[separator]} between the cells (CSV), but a row is a JSON object: "
        f'convert it with python3 -c "{program}" > ROWS.jsonl'
    )
