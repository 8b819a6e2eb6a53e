"""JSON files: one object per line (JSONL), or one array of objects. Torch-free."""

from __future__ import annotations

import codecs
import json
import os
from array import array
from collections.abc import Generator, Iterator, Sequence
from hashlib import blake2b
from io import BufferedReader
from pathlib import Path
from typing import Final

from slurmrl.data.sources.base import (
    NOT_AN_OBJECT,
    NULS,
    READ_BYTES,
    ROW_BYTES,
    RowSource,
    SourceRow,
    not_utf_8,
    other_form,
    state_of_one,
    unreadable,
)
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


SPACE = " \t\r\n"
BOM = codecs.BOM_UTF8
HEAD_BYTES = 1 << 16
"""Where a file's first character is looked for."""
TOKEN_CHARACTERS = 16
"""The longest token without quotes that can be cut at the end of what was read; numbers are not
rows anyway."""


def begins_array(path: Path) -> bool:
    """Whether the first character of a file is a bracket. Raises EnvironmentFailure."""
    try:
        with path.open("rb") as file:
            start = file.read(HEAD_BYTES).removeprefix(BOM).lstrip()
    except OSError as error:
        raise unreadable(path, error) from error
    return start.startswith(b"[")


class JsonArray(RowSource):
    """Rows of a file that holds one JSON array.

    Its elements are parsed one by one. Memory grows with the file only by the line number of each
    element.
    """

    def __init__(self, path: Path, files: Sequence[Path], most_bytes: int | None = None) -> None:
        super().__init__(path, files, most_bytes)
        self._digest = blake2b(digest_size=16)
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        """What has been read and not yet dropped."""
        self._at = 0
        """The next character in it."""
        self._line = 1
        """The line of that character."""
        self._lines = array("q")
        """The line of each element."""

    def rows(self) -> Generator[SourceRow]:
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                self.size, self.state = status.st_size, state_of_one(status)
                yield from self._elements(file)
        except OSError as error:
            raise unreadable(self.path, error) from error

    def fingerprint(self) -> str:
        return self._digest.hexdigest()

    def where(self, number: int) -> str:
        return f"{self.path}:{self._lines[number - 1]}"

    def _elements(self, file: BufferedReader) -> Iterator[SourceRow]:
        self._expect(file, "[")
        if self._next(file) == "]":
            self._step(1)
        else:
            while True:
                if self._next(file) == "]":
                    raise self._wrong("not JSON: ',' before ']'; remove the comma")
                self._lines.append(self._line)
                yield self._element(file)
                if self._expect(file, ",]") == "]":
                    break
                if self._most_bytes is not None and self._consumed() > self._most_bytes:
                    self.whole = False
                    return
        if left := self._next(file):
            lists = "; each line has a list, but a row is an object" if left == "[" else ""
            raise self._wrong(f"{left!r} after the end of the array{lists}")

    def _element(self, file: BufferedReader) -> SourceRow:
        """Parse the element at the present place, and read on until it is complete."""
        number = len(self._lines)
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._at)
                if end < len(self._text) or isinstance(value, dict) or not self._read(file, 0):
                    break
            except RecursionError:
                raise self._wrong("not JSON: nested too deeply") from None
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string")
                cut = cut or error.pos + TOKEN_CHARACTERS >= len(self._text)
                if not (cut and self._read(file, len(self._text) - self._at)):
                    self._step(error.pos - self._at)
                    raise self._wrong(f"not JSON: {error.msg}") from error
            if len(self._text) - self._at > ROW_BYTES:
                raise self._wrong(f"a row is longer than {ROW_BYTES >> 20} MiB")
        raw = self._text[self._at : end].encode()
        self._step(end - self._at)
        if isinstance(value, dict):
            return SourceRow(number, raw, value, "")
        return SourceRow(number, raw, None, NOT_AN_OBJECT)

    def _expect(self, file: BufferedReader, allowed: str) -> str:
        """Pass one of these characters."""
        present = self._next(file)
        if not present or present not in allowed:
            wanted = " or ".join(map(repr, allowed))
            found = repr(present) if present else "the end of the file, which may be cut"
            raise self._wrong(f"not JSON: expected {wanted}, found {found}")
        self._step(1)
        return present

    def _next(self, file: BufferedReader) -> str:
        """Skip white space; return the character there, "" at the end of the file."""
        while True:
            rest = len(self._text)
            at = self._at
            while at < rest and self._text[at] in SPACE:
                at += 1
            self._step(at - self._at)
            if at < rest:
                return self._text[at]
            if not self._read(file, 0):
                return ""

    def _read(self, file: BufferedReader, count: int) -> bool:
        """Read at least ``count`` bytes more; False at the end of the file."""
        data = file.read(max(READ_BYTES, count))
        self._digest.update(data)
        self.done += len(data)
        try:
            text = self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise self._wrong(not_utf_8(error, " after this line")) from error
        self._text = self._text[self._at :] + text
        self._at = 0
        if (place := text.find("\0")) >= 0:
            self._step(len(self._text) - len(text) + place)
            raise self._wrong(NULS)
        return bool(data)

    def _step(self, characters: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + characters)
        self._at += characters

    def _consumed(self) -> int:
        return self.done - (len(self._text) - self._at)

    def _wrong(self, message: str) -> ConfigError:
        return ConfigError((Problem(f"{self.path}:{self._line}", "", message),))
