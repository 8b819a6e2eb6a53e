"""JSONL files: one object per line. Torch-free."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

from slurmrl.data.sources.base import (
    NOT_AN_OBJECT,
    ROW_BYTES,
    RowSource,
    SourceRow,
    state_of_one,
    unreadable,
)
from slurmrl.data.sources.encoding import not_utf_8
from slurmrl.data.sources.other_forms import NULS, other_form
from slurmrl.errors import ConfigError, Problem

CUT: Final = "the file ends in this row, so it may be cut"


class JsonLines(RowSource):
    """Blank lines are skipped. A row's number is its line."""

    def __init__(self, path: Path, files: Sequence[Path], most_bytes: int | None = None) -> None:
        super().__init__(path, files, most_bytes)
        self._digest = blake2b(digest_size=16)

    def rows(self) -> Generator[SourceRow]:
        first = True
        for number, line in enumerate(self._lines(), start=1):
            if len(line) > ROW_BYTES:
                message = f"the line is longer than {ROW_BYTES >> 20} MiB; a row is one line"
                raise ConfigError((Problem(self.where(number), "", message),))
            if b"\0" in line:
                raise ConfigError((Problem(self.where(number), "", NULS),))
            if not line.strip():
                continue
            try:
                row = parsed(number, line.strip())
            except UnicodeDecodeError as error:  # so are the others, probably
                raise ConfigError((Problem(self.where(number), "", not_utf_8(error)),)) from error
            if first and row.problem and (form := other_form(self.path)):
                raise ConfigError((Problem(self.where(number), "", form),))
            first = False
            if row.problem and not line.rstrip(b" \t\r").endswith((b"\n", b"}")):
                row = row._replace(problem=f"{row.problem}; {CUT}")
            yield row

    def fingerprint(self) -> str:
        return self._digest.hexdigest()

    def where(self, number: int) -> str:
        return f"{self.path}:{number}"

    def _lines(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                self.size, self.state = status.st_size, state_of_one(status)
                most = self._most_bytes if self._most_bytes is not None else self.size
                limited = most < self.size
                while line := file.readline(ROW_BYTES + 1):
                    if limited and self.done + len(line) > most:
                        self.whole = False
                        return
                    self.done += len(line)
                    self._digest.update(line)
                    yield line
                self.size = self.done  # it may have grown
        except OSError as error:
            raise unreadable(self.path, error) from error


def parsed(number: int, raw: bytes) -> SourceRow:
    """A row from its JSON text. Raises UnicodeDecodeError."""
    message = NOT_AN_OBJECT
    try:
        row = json.loads(raw.decode("utf-8-sig", "surrogatepass"))
        if isinstance(row, dict):
            return SourceRow(number, raw, row, "")
    except RecursionError:
        message = "not JSON: nested too deeply"
    except json.JSONDecodeError as error:
        message = f"not JSON: {error.msg} in column {error.colno}{_advice(raw)}"
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        message = f"not JSON: {error}"
    return SourceRow(number, raw, None, message)


def _advice(raw: bytes) -> str:
    """Return what to do about a common mistake."""
    if b"\r" in raw:
        return ": lines end with carriage returns alone; convert them (tr '\\r' '\\n')"
    if raw.endswith(b",") and raw.startswith(b"{"):
        return ": a comma follows the object; a line has an object and nothing else"
    if raw.startswith(b"{'"):
        return ": Python printed this object; write json.dumps(row) instead"
    return ""
