"""Base class of file formats, and the diagnosis of unsuitable files. Torch-free.

If a file is compressed, not UTF-8 or not JSON (`wrong_beginning`), the message says how to convert
it. `arrow_files` finds the Parquet files of a folder, and folders that Hugging Face `datasets` has
saved.
"""

from __future__ import annotations

import csv
import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from slurmrl.errors import ConfigError, EnvironmentFailure, Problem
from slurmrl.fsio import inputs
from slurmrl.registry import near

READ_BYTES = 1 << 20
ROW_BYTES = 256 << 20
"""Maximum number of bytes of a row."""
SETTLED_NS = 2_000_000_000
"""Nanoseconds after a change of a file when the next change certainly changes its times: file
systems store times with a resolution of up to two seconds."""
NOT_AN_OBJECT = "must be a JSON object"


class SourceRow(NamedTuple):
    number: int
    """Line number in a JSONL file, row number in other files; counted from 1."""
    raw: bytes
    """The row as JSON."""
    row: dict[str, Any] | None
    """The row; None if it is not a JSON object."""
    problem: str
    """Reason why the row is not a JSON object."""


class RowSource(ABC):
    """Reads all rows once, one by one, in the order of the files."""

    def __init__(self, path: Path, files: Sequence[Path], most_bytes: int | None = None) -> None:
        self.path = path
        self.files = tuple(files)
        self.size = 0
        """Bytes of the files."""
        self.done = 0
        """Approximate number of bytes that have been read."""
        self.whole = True
        """False once rows have been left out because of ``most_bytes``."""
        self.state = ""
        """`state_of` the files at the time when they were opened."""
        self._most_bytes = most_bytes
        self._digest = blake2b(digest_size=16)

    @abstractmethod
    def rows(self) -> Generator[SourceRow]:
        """Yield the rows.

        :raises ConfigError: the rest of the file cannot be understood.
        :raises EnvironmentFailure: a file cannot be read.
        """

    def fingerprint(self) -> str:
        """Return `fingerprint_of` the files, or of the part of a file that was read."""
        return self._digest.hexdigest()

    @abstractmethod
    def where(self, number: int) -> str:
        """Return the place of a row that was read, for messages: ``rows.jsonl:3``."""


def fingerprint_of(files: Sequence[Path], progress: Callable[[float], None]) -> str:
    """Return a fingerprint that changes with the bytes of the files and with their number.

    ``progress`` receives the share that has been read. Raises EnvironmentFailure.
    """
    digest = blake2b(digest_size=16)
    done, path = 0, files[0]
    try:
        size = max(sum(path.stat().st_size for path in files), 1)
        for path in files:
            if len(files) > 1:
                digest.update(f"{path.name} {path.stat().st_size} ".encode())
            with path.open("rb") as file:
                while part := file.read(READ_BYTES):
                    digest.update(part)
                    done += len(part)
                    progress(done / size)
    except OSError as error:
        raise unreadable(path, error) from error
    return digest.hexdigest()


def state_of(files: Sequence[Path]) -> str:
    """Return the sizes and times of files, which change with their content.

    Return "" if a file was changed so recently that another change may leave size and times the
    same. Raises EnvironmentFailure.
    """
    states = []
    for path in files:
        try:
            states.append(state_of_one(path.stat()))
        except OSError as error:
            raise unreadable(path, error) from error
    return " ".join(states) if all(states) else ""


def state_of_one(status: os.stat_result) -> str:
    if status.st_ctime_ns > time.time_ns() - SETTLED_NS:
        return ""
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def unreadable(path: Path, error: OSError) -> EnvironmentFailure:
    return EnvironmentFailure(f"cannot read dataset {path}: {error.strerror or error}")


_COMPRESSED: Final = "is compressed with {0}; decompress it first ({0} -d)"
_UTF: Final = "is {0} text; convert it to UTF-8 (iconv -f {0} -t UTF-8)"
BEGINNINGS: Final = {
    b"\x1f\x8b": _COMPRESSED.format("gzip"),
    b"\x28\xb5\x2f\xfd": _COMPRESSED.format("zstd"),
    b"\xfd7zXZ\x00": _COMPRESSED.format("xz"),
    b"BZh": _COMPRESSED.format("bzip2"),
    b"PK\x03\x04": "is a ZIP archive, or a workbook; unpack it first, or save it as CSV",
    b"PAR1": "is a Parquet file; rename it to *.parquet",
    b"ARROW1": "is an Arrow file; save it as Parquet",
    b"\xff" * 4: "is an Arrow file; name the folder that datasets has saved, or save it as Parquet",
    b"SQLite format 3": "is a database of SQLite; export its rows as JSONL",
    b"\xff\xfe\x00\x00": _UTF.format("UTF-32"),
    b"\x00\x00\xfe\xff": _UTF.format("UTF-32"),
    b"\xff\xfe": _UTF.format("UTF-16"),
    b"\xfe\xff": _UTF.format("UTF-16"),
    b'{\x00"\x00': _UTF.format("UTF-16LE"),
    b'\x00{\x00"': _UTF.format("UTF-16BE"),
}
"""Problem of a file by its first bytes."""
HEAD_BYTES: Final = 1 << 16
"""Number of bytes at the start of a file that are examined."""


def head_of(path: Path) -> bytes:
    """Return the first `HEAD_BYTES` of a file. Raises EnvironmentFailure."""
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error


def wrong_beginning(path: Path) -> str:
    """Return the problem that a file's first bytes show; "" for none. Raises EnvironmentFailure."""
    start = head_of(path)
    return next((what for first, what in BEGINNINGS.items() if start.startswith(first)), "")


def not_utf_8(error: UnicodeDecodeError, where: str = "") -> str:
    """Return the problem of text that cannot be decoded."""
    byte = error.object[error.start]
    return (
        f"not UTF-8 text{where} (byte 0x{byte:02x}: {error.reason}); convert the file to UTF-8, "
        "for example with iconv -f LATIN1 -t UTF-8"
    )


ALIKE: Final = 3
"""Maximum number of lines to compare with the first line."""
SUFFIXES: Final = {".csv": ",", ".tsv": "\t"}
"""Mapping from a file's suffix to the separator of its table."""
NAMES: Final = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}
POINTER: Final = "version https://git-lfs.github.com/"
NO_ROWS: Final = ", but a dataset has a JSON object on each line (or is a JSON array, or Parquet)"
NULS: Final = (
    "contains NUL bytes, which are not text: the file was not written completely, or was damaged "
    "(a full disk, a crash); write it again"
)


def other_form(path: Path) -> str:
    """Return why the format of a file with a wrong first row is wrong; "" if it is right.

    Raises EnvironmentFailure.
    """
    lines = head_of(path).decode("utf-8-sig", errors="replace").lstrip().splitlines()
    if not lines or re.search("[\0-\b\ufffd]", lines[0]):  # a blank or binary file
        return ""
    first = lines[0].rstrip()
    if first.startswith(POINTER):
        return "is a pointer of Git LFS, not the file: run git lfs pull in its folder"
    if first.startswith("<"):
        return "is HTML or XML, perhaps the error page of a download; get the file again"
    if first.startswith("{"):
        return _object_on_lines(first) if len(lines) > 1 else ""
    if separator := _separator(lines) or SUFFIXES.get(path.suffix, ""):
        return _table(separator)
    has_rows = any(line.startswith(("{", "[")) for line in lines)
    return "" if has_rows else f"begins with {first[:40]!r}{NO_ROWS}"


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
    """Return the separator of the cells of a table; "" for other text."""
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


SPLITS, SAVED = "dataset_dict.json", "state.json"
NAMES_OF_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
ROWS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
_SHARD = re.compile(r"(.+?)(-(\d+)-of-(\d+)(-[0-9a-f]+)?)?\.parquet")
_SPLIT = re.compile(rf"((?:.*[-._ \d])?)({'|'.join(NAMES_OF_SPLITS)})[-._ v\d]*(-[0-9a-f]{{8,}})?")
"""Pattern of a file name that ends with a split; numbers and a fingerprint may follow."""
OTHERS: Final = "(others)"


def arrow_files(path: Path, split: str | None) -> Sequence[Path]:
    """Return the Arrow or Parquet files of a dataset, in order.

    :raises ConfigError: a folder without a dataset, without this split, or without some of its
        numbered files.
    :raises UnreadableInputError: the folder cannot be read.
    """
    if not path.is_dir():
        _check_split(path, split, [])
        return [path]
    names = inputs.list_names(path)
    if SPLITS in names:
        splits = inputs.read_json(path / SPLITS).get("splits", [])
        _check_split(path, split, splits)
        return _saved(path / str(split or splits[0]))
    if SAVED in names:
        own = inputs.read_json(path / SAVED).get("_split")
        _check_split(path, split, [own] if own else [])
        return _saved(path)
    shards = _splits_of([one for name in sorted(names) if (one := _SHARD.fullmatch(name))])
    if not shards:
        raise ConfigError((Problem("", "path", f"'{path}' is not allowed: {no_dataset(path)}"),))
    splits = list(dict.fromkeys(shards.values()))
    _check_split(path, split, splits if splits != [OTHERS] else [])
    chosen = [match for match, own in shards.items() if split in (None, own)]
    _check_numbers(path, chosen)
    return [path / match.string for match in chosen]


def no_dataset(path: Path) -> str:
    """Return why a folder is not a dataset; "" if it may be one. Raises UnreadableInputError."""
    names = sorted(inputs.list_names(path))
    if any(name in (SPLITS, SAVED) or _SHARD.fullmatch(name) for name in names):
        return ""
    files = [name for name in names if name.endswith(ROWS)]
    remedy = f"; name one of its files, such as {files[0]}, or several as sources" if files else ""
    return f"it is a folder without {SPLITS}, {SAVED} or *.parquet{remedy}"


def _splits_of(files: Sequence[re.Match[str]]) -> dict[re.Match[str], str]:
    """Return the split of each file of a folder.

    Files ``train-00000-of-00002.parquet`` have the split ``train``, like ``train.parquet``. For
    ``math_train.parquet``, the folder must also have ``math_test.parquet`` or another such pair: a
    single ``dev`` can be any word of a name.
    """
    words = {file: _SPLIT.fullmatch(file[1].lower()) for file in files}
    pairs: dict[str, set[str]] = {}
    for word in filter(None, words.values()):
        pairs.setdefault(word[1], set()).add(word[2])
    paired = any(len(each) > 1 for each in pairs.values())
    return {
        file: file[1] if file[2] else word[2] if word and (paired or not word[1]) else OTHERS
        for file, word in words.items()
    }


def _check_numbers(path: Path, files: Sequence[re.Match[str]]) -> None:
    """Reject incomplete or mixed sets of files such as ``train-00000-of-00002.parquet``."""
    sets: dict[str, dict[str, list[int]]] = {}
    for file in files:
        if file[2]:
            sets.setdefault(file[1], {}).setdefault(file[4], []).append(int(file[3]))
    for name, totals in sets.items():
        most = {total: max(Counter(each).values()) for total, each in totals.items()}
        versions = [total for total, count in most.items() for _ in range(count)]
        if len(versions) > 1:
            has = " and ".join(f"-of-{total}" for total in versions)
            message = f"{path} has files of two versions of {name} ({has}); remove one version"
            raise ConfigError((Problem("", "path", message),))
        ((total, present),) = totals.items()
        first = 1 if int(total) in present else 0
        missing = sorted(set(range(first, first + int(total))).difference(present))
        if missing:
            lacks = f"{name}-{missing[0]:0{len(total)}d}-of-{total}.parquet"
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            message = f"{path} lacks {lacks}{more}; copy what is missing, or rename the other files"
            raise ConfigError((Problem("", "path", message),))


def _saved(folder: Path) -> Sequence[Path]:
    """Return the files of a saved `Dataset`."""
    state = inputs.read_json(folder / SAVED)
    files = [str(each["filename"]) for each in state.get("_data_files") or []]
    if not files or state.get("_indices_data_files"):
        message = f"'{folder}' has no data files, or selects or orders their rows: save it again"
        raise ConfigError((Problem("", "path", message),))
    return [folder / Path(name).name for name in files]


def _check_split(path: Path, split: str | None, splits: Sequence[str]) -> None:
    if split is None and len(splits) > 1:
        message = f"is required: {path} has the splits {', '.join(splits)}"
    elif split is not None and split not in splits:
        has = near(split, list(splits)) if splits else f"{path} has no splits"
        message = f"'{split}' is not allowed; {has}"
    else:
        return
    raise ConfigError((Problem("", "split", message),))
